"""A job that another machine submitted: found in its directory on the cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import SchedulerError, SpecError, UnknownJob
from ..job import JobSpec
from ..target import Found, Plan
from .cluster import Cluster
from .native_id import Native


def find(cluster: Cluster, target: str, job_id: str, sweep: Mapping[str, Any]) -> Found | None:
    """Raises UnknownJob for a job that was put there and that Slurm never had, and what asking raises.

    sweep: of a job of a sweep, the id of its `first` one and where (`at`) it is in it.
    """
    answer = cluster.ask([{"op": "find", "job": job_id, **sweep}])[0][0]
    if answer is None:
        return None
    if answer["slurm"] is None:
        raise UnknownJob(f"job {job_id} is being submitted to target {target} this moment, or Slurm never had it")
    try:
        spec = JobSpec.from_json(answer["spec"])
    except SpecError as error:
        raise SchedulerError(f"another version of accel submitted job {job_id}: {error}") from None
    plan = Plan(
        target=target,
        kind="slurm",
        job_id=job_id,
        files={"slurm/spec.json": json.dumps(answer["spec"], indent=2) + "\n"},
        settings={"spec": answer["spec"]},
        warnings=("submitted by another machine: this is what it asked for",),
    )
    return Found(native_id=str(Native(answer["slurm"], job_id)), spec=spec, plan=plan)
