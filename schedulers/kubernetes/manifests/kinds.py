"""The kinds of jobs that a cluster can run, by its API groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...errors import SpecError
from ...job import JobSpec
from ..options import KubernetesOptions
from .build import BUILDERS

# What makes a cluster know a kind.
_INSTALLED_BY: Mapping[str, str] = {
    "pytorchjob": "Kubeflow's training operator, 1.7 to 1.9",
    "jobset": "the JobSet controller",
    "trainjob": "Kubeflow Trainer v2",
    "job": "Kubernetes itself",
}
_VOLCANO = "scheduling.volcano.sh"
# From it on a Job has `backoffLimitPerIndex`, without which its pods cannot tell their attempt.
_PER_INDEX = (1, 28)


def runnable(api_versions: Iterable[str]) -> list[str]:
    """Return the kinds that a cluster with these API versions (`batch/v1`, `kubeflow.org/v1`, …) knows."""
    there = set(api_versions)
    return [kind for kind, builder in BUILDERS.items() if builder.API_VERSION in there]


def check_kind(options: KubernetesOptions, api_versions: Iterable[str], target: str) -> None:
    """Raise SpecError, which names the available kinds, if the cluster lacks the requested kind or Volcano."""
    there = set(api_versions)
    wanted = BUILDERS[options.workload]
    if wanted.API_VERSION not in there:
        group = wanted.API_VERSION.partition("/")[0]
        others = sorted(each for each in there if each.partition("/")[0] == group)
        found = runnable(there)
        why = f"it has {', '.join(others)}" if others else f"{_INSTALLED_BY[options.workload]} is not installed there"
        remedy = f"use workload: {' or '.join(found)}" if found else "and it knows no other kind that accel can make"
        raise SpecError(f"target {target}: the cluster has no {wanted.API_VERSION} ({why}); {remedy}")
    grouped = options.volcano_queue is not None and options.workload in ("job", "jobset")
    if grouped and not any(each.partition("/")[0] == _VOLCANO for each in there):
        raise SpecError(
            f"target {target}: volcano_queue: the cluster has no {_VOLCANO}: Volcano is not installed there"
        )


def check_restarts(
    spec: JobSpec, options: KubernetesOptions, version: Callable[[], tuple[int, int] | None], target: str
) -> None:
    """Raise SpecError for a Job with restarts before Kubernetes 1.28. `version` is called for such a Job only."""
    if options.workload == "job" and spec.retry.max_restarts and (there := version()) and there < _PER_INDEX:
        raise SpecError(
            f"target {target}: --max-restarts of workload job needs Kubernetes 1.28 (backoffLimitPerIndex), and the "
            f"cluster has {there[0]}.{there[1]}; use workload: jobset or pytorchjob"
        )
