"""Discovery of jobs that another machine submitted, by their directory on the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnknownJob
from ..target import DiscoveredJob
from .cluster import Cluster
from .native_id import Native


def find(cluster: Cluster, target: str, job_id: str, sweep: Mapping[str, Any]) -> DiscoveredJob | None:
    """Find a job. Raises UnknownJob if it was sent there and Slurm has no number for it, and what `query` raises.

    sweep: for a job of a sweep, the id of its `first` job and this job's index (`at`).
    """
    reply = cluster.query([{"op": "find", "job": job_id, **sweep}])[0][0]
    if reply is None:
        return None
    if reply["slurm"] is None:
        raise UnknownJob(f"job {job_id} is still being submitted to target {target}, or Slurm never received it")
    native_id = str(Native(reply["slurm"], job_id))
    return DiscoveredJob.of(native_id, lambda: reply["spec"], target=target, kind="slurm", job_id=job_id)
