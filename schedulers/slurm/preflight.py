"""Checks of a cluster without submitting a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import nearest
from ..target import CheckReport
from .cluster import Cluster
from .options import SlurmOptions

_HEADER = ["partition", "state", "time limit", "nodes", "running/idle", "gres"]


def check(cluster: Cluster, options: SlurmOptions, gpus: int) -> CheckReport:
    """Check the cluster for `gpus` GPUs on each node. Raises Unreachable, SchedulerError if there is no Slurm."""
    facts = cluster.query([{"op": "check", "clusters": options.sbatch.get("clusters")}])[0][0]
    partitions: list[list[str]] = facts["partitions"]
    failures = [*_partitions(options, partitions), *_gpus(options, partitions, gpus)]
    failures += filter(None, (cluster.missing_package(), facts["root"]))
    rows = [["-" if cell == "(null)" else cell for cell in row] for row in partitions]
    return CheckReport(table=[_HEADER, *rows], failures=tuple(failures), warnings=tuple(_warnings(options, facts)))


def _partition_names(options: SlurmOptions) -> list[str]:
    values = (options.partition,) if isinstance(options.partition, str) else options.partition or ()
    return [partition for value in values for partition in value.split(",")]


def _partitions(options: SlurmOptions, partitions: Sequence[Sequence[str]]) -> list[str]:
    states = {row[0]: row[1] for row in partitions}
    failures = []
    for partition in _partition_names(options):
        if partition not in states:
            failures.append(f"no partition {partition!r}{nearest(partition, states)} (partitions: {', '.join(states)})")
        elif not states[partition].startswith("up"):
            failures.append(f"partition {partition} is {states[partition]}")
    return failures


def _gpus(options: SlurmOptions, partitions: Sequence[Sequence[str]], requested: int) -> list[str]:
    """Return a line if no node has that many GPUs in sinfo (`gpu:a100:4(S:0-1),nvme:1`)."""
    partition_names = _partition_names(options)
    available = max(
        (_count(row[-1]) for row in partitions if not partition_names or row[0] in partition_names), default=0
    )
    return [f"no node has {requested} GPUs: sinfo shows at most {available}"] if requested > available else []


def _count(gres: str) -> int:
    entries = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [entry.split(":")[-1] for entry in entries if entry.split(":")[0] == "gpu"]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def _warnings(options: SlurmOptions, facts: dict[str, Any]) -> list[str]:
    warnings = []
    if facts["accounting"] is not True:
        problem = "is off" if facts["accounting"] is False else f"does not respond: {facts['accounting']}"
        warnings.append(f"accounting {problem}: Slurm forgets within minutes how a job without a result file ended")
    version = facts["version"].split()[-1]
    if options.slurm_version is not None and not version.startswith(options.slurm_version):
        warnings.append(f"the cluster has Slurm {version}, not {options.slurm_version} (slurm_version in the target)")
    return warnings
