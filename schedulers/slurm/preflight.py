"""Checks of a cluster without submitting a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import nearest
from ..target import Checked
from .cluster import Cluster
from .options import SlurmOptions

_HEADER = ["partition", "state", "time limit", "nodes", "running/idle", "gres"]


def check(cluster: Cluster, options: SlurmOptions, gpus: int) -> Checked:
    """Check the cluster for `gpus` GPUs on each node. Raises Unreachable, SchedulerError if there is no Slurm."""
    found = cluster.ask([{"op": "check", "clusters": options.sbatch.get("clusters")}])[0][0]
    partitions: list[list[str]] = found["partitions"]
    failures = [*_partitions(options, partitions), *_gpus(options, partitions, gpus), *_packages(cluster)]
    if found["root"] is not None:
        failures.append(found["root"])
    rows = [["-" if cell == "(null)" else cell for cell in row] for row in partitions]
    return Checked(table=[_HEADER, *rows], failures=tuple(failures), warnings=tuple(_warnings(options, found)))


def _named(options: SlurmOptions) -> list[str]:
    words = (options.partition,) if isinstance(options.partition, str) else options.partition or ()
    return [each for word in words for each in word.split(",")]


def _partitions(options: SlurmOptions, partitions: Sequence[Sequence[str]]) -> list[str]:
    states = {row[0]: row[1] for row in partitions}
    failures = []
    for partition in _named(options):
        if partition not in states:
            failures.append(f"no partition {partition!r}{nearest(partition, states)} (there are {', '.join(states)})")
        elif not states[partition].startswith("up"):
            failures.append(f"partition {partition} is {states[partition]}")
    return failures


def _gpus(options: SlurmOptions, partitions: Sequence[Sequence[str]], wanted: int) -> list[str]:
    """Return a line if no node has that many GPUs in sinfo (`gpu:a100:4(S:0-1),nvme:1`)."""
    named = _named(options)
    most = max((_count(row[-1]) for row in partitions if not named or row[0] in named), default=0)
    return [f"no node has {wanted} GPUs: the most that sinfo shows is {most}"] if wanted > most else []


def _count(gres: str) -> int:
    words = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [word.split(":")[-1] for word in words if word.split(":")[0] == "gpu"]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def _packages(cluster: Cluster) -> list[str]:
    missing = cluster.lacking()
    return [] if missing is None else [missing]


def _warnings(options: SlurmOptions, found: dict[str, Any]) -> list[str]:
    warnings = []
    if found["accounting"] is not True:
        why = "is off" if found["accounting"] is False else f"does not answer: {found['accounting']}"
        warnings.append(f"accounting {why}: of a job that leaves no result, Slurm forgets within minutes how it ended")
    version = found["version"].split()[-1]
    if options.slurm_version is not None and not version.startswith(options.slurm_version):
        warnings.append(f"the cluster has Slurm {version}, and the target says {options.slurm_version}")
    return warnings
