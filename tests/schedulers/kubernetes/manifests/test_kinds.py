"""A kind that a cluster does not know is refused with those that it does."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers import SpecError
from schedulers.kubernetes.manifests.kinds import check_kind, runnable
from tests.schedulers.kubernetes.support import least

_PLAIN = ["v1", "apps/v1", "batch/v1"]


def test_what_a_cluster_can_run() -> None:
    assert runnable([*_PLAIN, "jobset.x-k8s.io/v1alpha2", "kubeflow.org/v1"]) == ["pytorchjob", "jobset", "job"]
    assert runnable(["v1"]) == []


@pytest.mark.parametrize(
    ("given", "there", "message"),
    [
        ({}, _PLAIN, "target k: the cluster has no kubeflow.org/v1 (Kubeflow's training operator, 1.7 to 1.9 is not "
         "installed there); use workload: job"),
        ({}, [*_PLAIN, "kubeflow.org/v1beta1", "jobset.x-k8s.io/v1alpha2"],
         "target k: the cluster has no kubeflow.org/v1 (it has kubeflow.org/v1beta1); use workload: jobset or job"),
        ({"workload": "job", "volcano_queue": "q"}, _PLAIN,
         "target k: volcano_queue: the cluster has no scheduling.volcano.sh: Volcano is not installed there"),
    ],
)  # fmt: skip
def test_what_it_cannot(given: dict[str, Any], there: list[str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_kind(least(**given), there, "k")
    assert str(caught.value) == message


def test_what_it_can() -> None:
    check_kind(least(workload="job"), _PLAIN, "k")
    check_kind(least(workload="job", volcano_queue="q"), [*_PLAIN, "scheduling.volcano.sh/v1beta1"], "k")
