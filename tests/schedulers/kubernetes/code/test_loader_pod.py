"""The pod that puts code into a claim: it can start where the job's pods can, and takes nothing that they need."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from schedulers import JobSpec, Resources, SpecError
from schedulers.kubernetes.manifests import build
from schedulers.kubernetes.manifests.build import loader_pod
from schedulers.kubernetes.manifests.code_delivery import Code
from schedulers.kubernetes.options import KubernetesOptions
from tests.needs import package
from tests.schedulers.kubernetes.support import JOB_ID, everything, everything_spec, least

CLAIM = {"code": "pvc", "code_claim": "snapshots"}


def of(spec: JobSpec, given: KubernetesOptions) -> dict[str, Any]:
    return loader_pod(spec, given, JOB_ID, "k")


def test_it_is_placed_as_the_job_s_pods_are() -> None:
    spec, given = everything_spec(), everything("job", **CLAIM)
    pods = build.template(spec, given, "everything", JOB_ID, Code(kind="pvc"), "k")()
    made = of(spec, given)
    for key in ("nodeSelector", "affinity", "tolerations", "serviceAccountName", "priorityClassName",
                "imagePullSecrets", "securityContext"):  # fmt: skip
        assert made["spec"][key] == pods["spec"][key]
    assert made["metadata"]["labels"] == pods["metadata"]["labels"]
    assert made["metadata"]["annotations"] == pods["metadata"]["annotations"]
    (container,), (main,) = made["spec"]["containers"], pods["spec"]["containers"]
    for key in ("image", "imagePullPolicy", "securityContext"):
        assert container[key] == main[key]
    assert container["command"][0] == "/opt/bin/python3"


@pytest.mark.parametrize(
    ("wanted", "more", "given"),
    [
        (Resources(), {}, None),
        (Resources(gpus=8, cpus=64, memory_gb=480, shm_gb=1.5), {}, {"cpu": "1", "memory": "1Gi"}),
        (Resources(cpus=1, memory_gb=0.5), {}, {"cpu": "1", "memory": "512Mi"}),
        (Resources(memory_gb=8), {"ephemeral-storage": "10Gi", "rdma/hca": 1},
         {"memory": "1Gi", "ephemeral-storage": "10Gi"}),
    ],
)  # fmt: skip
def test_a_quota_is_told_what_it_uses_which_is_little(
    wanted: Resources, more: dict[str, Any], given: dict[str, str] | None
) -> None:
    (container,) = of(JobSpec(argv=("a",), resources=wanted), least(resources=more, **CLAIM))["spec"]["containers"]
    assert container.get("resources") == (None if given is None else {"requests": given, "limits": given})


def test_it_is_none_of_the_gang() -> None:
    made = of(JobSpec(argv=("a",), nodes=2), least(workload="job", volcano_queue="research", **CLAIM))
    assert "schedulerName" not in made["spec"]
    assert build.GROUP_ANNOTATION not in made["metadata"]["annotations"]


def test_what_pod_patch_makes_of_pods_it_makes_of_this_one() -> None:
    package("kubernetes")
    spec = {"runtimeClassName": "gvisor", "schedulingGates": [{"name": "example.org/gate"}],
            "initContainers": [{"name": "accel-code", "securityContext": {"runAsUser": 7}}]}  # fmt: skip
    made = of(JobSpec(argv=("a",)), least(pod_patch={"spec": spec}, **CLAIM))
    assert made["spec"]["runtimeClassName"] == "gvisor"
    assert made["spec"]["containers"][0]["securityContext"]["runAsUser"] == 7
    assert not {"schedulingGates", "initContainers"} & set(made["spec"])
    gone = {"spec": {"initContainers": [{"name": "accel-code", "$patch": "delete"}]}}
    with pytest.raises(SpecError, match="pod_patch: the container 'accel-code' loads the code and cannot be removed"):
        of(JobSpec(argv=("a",)), least(pod_patch=gone, **CLAIM))


def test_a_plan_shows_it() -> None:
    spec, given = JobSpec(argv=("a",), name="train"), least(**CLAIM)
    assert yaml.safe_load(build.plan(spec, given, JOB_ID, "k").files["kubernetes/code-pod.yaml"]) == of(spec, given)
    assert "kubernetes/code-pod.yaml" not in build.plan(spec, least(), JOB_ID, "k").files
