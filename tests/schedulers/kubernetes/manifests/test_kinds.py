"""A kind that a cluster does not know is refused with those that it does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from schedulers import JobSpec, Retry, SpecError
from schedulers.kubernetes.manifests.build import check_kind, check_restarts, runnable
from tests.schedulers.kubernetes.support import least

_PLAIN = ["v1", "apps/v1", "batch/v1"]


def test_what_a_cluster_can_run() -> None:
    assert runnable([*_PLAIN, "jobset.x-k8s.io/v1alpha2", "kubeflow.org/v1"]) == ["pytorchjob", "jobset", "job"]
    assert runnable(["v1"]) == []


@pytest.mark.parametrize(
    ("given", "there", "message"),
    [
        ({}, _PLAIN, "target k: the cluster has no kubeflow.org/v1 (Kubeflow's training operator, 1.7 to 1.9 is not "
         "installed); use workload: job"),
        ({}, [*_PLAIN, "kubeflow.org/v1beta1", "jobset.x-k8s.io/v1alpha2"],
         "target k: the cluster has no kubeflow.org/v1 (it has kubeflow.org/v1beta1); use workload: jobset or job"),
        ({"workload": "job", "volcano_queue": "q"}, _PLAIN,
         "target k: volcano_queue: the cluster has no scheduling.volcano.sh: Volcano is not installed"),
    ],
)  # fmt: skip
def test_what_it_cannot(given: dict[str, Any], there: list[str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_kind(least(**given), there, "k")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("workload", "restarts", "version", "refused"),
    [
        ("job", 1, (1, 27), True),
        ("job", 1, (1, 28), False),
        ("job", 1, (2, 0), False),
        ("job", 1, None, False),  # it does not tell: its answer to the Job will
        ("job", 0, (1, 27), False),
        ("jobset", 1, (1, 27), False),
    ],
)
def test_a_job_with_restarts_needs_a_limit_for_each_index(
    workload: str, restarts: int, version: tuple[int, int] | None, refused: bool
) -> None:
    spec = JobSpec(argv=("t.py",), retry=Retry(max_restarts=restarts))
    with pytest.raises(SpecError) if refused else contextlib.nullcontext() as caught:
        check_restarts(spec, least(workload=workload), lambda: version, "k")
    assert caught is None or str(caught.value) == (
        "target k: --max-restarts of workload job needs Kubernetes 1.28 (backoffLimitPerIndex), and the cluster has "
        "1.27; use workload: jobset or pytorchjob"
    )


def test_what_it_can() -> None:
    check_kind(least(workload="job"), _PLAIN, "k")
    check_kind(least(workload="job", volcano_queue="q"), [*_PLAIN, "scheduling.volcano.sh/v1beta1"], "k")
