"""The user's strategic merge patch: the documented semantics, and one line for what may not come of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from schedulers import JobSpec, Resources, SpecError
from schedulers.kubernetes.manifests import build as builder
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.kubernetes.manifests import validate as validation
from schedulers.kubernetes.manifests.validate import MERGE_KEYS, apply_patch
from tests.needs import package
from tests.schedulers.kubernetes.support import JOB_ID, KINDS, least

_POD: dict[str, Any] = {
    "metadata": {"labels": {"a": "1", "b": "2"}, "finalizers": ["x", "y"]},
    "spec": {
        "nodeSelector": {"pool": "gpu"},
        "containers": [
            {
                "name": "one",
                "image": "i",
                "args": ["a", "b"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "ports": [{"containerPort": 80, "name": "web"}],
            },
            {"name": "two", "image": "j"},
        ],
        "tolerations": [{"key": "t"}],
        "volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}],
    },
}


@pytest.mark.parametrize(
    ("patch", "path", "expected"),
    [
        ({"metadata": {"labels": {"c": "3"}}}, "metadata.labels", {"a": "1", "b": "2", "c": "3"}),
        ({"metadata": {"labels": {"a": None}}}, "metadata.labels", {"b": "2"}),
        ({"metadata": {"labels": {"$patch": "replace", "c": "3"}}}, "metadata.labels", {"c": "3"}),
        ({"spec": {"nodeSelector": {"$patch": "delete"}}}, "spec.nodeSelector", None),
        ({"metadata": {"$deleteFromPrimitiveList/finalizers": ["x"]}}, "metadata.finalizers", ["y"]),
        ({"spec": {"tolerations": [{"key": "u"}]}}, "spec.tolerations", [{"key": "u"}]),
        ({"spec": {"containers": [{"name": "one", "args": ["c"]}]}}, "spec.containers.0.args", ["c"]),
        (
            {"spec": {"containers": [{"name": "two", "tty": True}]}},
            "spec.containers.1",
            {"name": "two", "image": "j", "tty": True},
        ),
        ({"spec": {"containers": [{"name": "two", "$patch": "delete"}]}}, "spec.containers.1", None),
        (
            {"spec": {"containers": [{"name": "three", "image": "k"}]}},
            "spec.containers.2",
            {"name": "three", "image": "k"},
        ),
        (
            {
                "spec": {
                    "containers": [{"name": "one", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}]
                }
            },
            "spec.containers.0.env",
            [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
        ),
        (
            {"spec": {"containers": [{"name": "one", "env": [{"$patch": "replace"}, {"name": "C", "value": "4"}]}]}},
            "spec.containers.0.env",
            [{"name": "C", "value": "4"}],
        ),
        (
            {"spec": {"containers": [{"name": "one", "ports": [{"containerPort": 80, "protocol": "UDP"}]}]}},
            "spec.containers.0.ports",
            [{"containerPort": 80, "name": "web", "protocol": "UDP"}],
        ),
        (
            {"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/"}}]}},
            "spec.volumes.0",
            {"name": "v", "hostPath": {"path": "/"}},
        ),
        ({"spec": {"imagePullSecrets": [{"name": "s"}]}}, "spec.imagePullSecrets", [{"name": "s"}]),
        ({"spec": {"affinity": {"podAffinity": None, "nodeAffinity": {}}}}, "spec.affinity", {"nodeAffinity": {}}),
    ],
)
def test_semantics(patch: dict[str, Any], path: str, expected: Any) -> None:
    before = copy.deepcopy(_POD)
    found: Any = apply_patch(_POD, patch, "patch")
    for step in path.split("."):
        found = (
            found[int(step)]
            if step.isdigit() and int(step) < len(found)
            else found.get(step)
            if isinstance(found, dict)
            else None
        )
    assert found == expected
    assert before == _POD


def test_the_ports_of_a_service_go_by_port() -> None:
    service = {"spec": {"ports": [{"port": 80, "name": "a"}]}}
    made = apply_patch(service, {"spec": {"ports": [{"port": 80, "targetPort": 8080}]}}, "patch")
    assert made["spec"]["ports"] == [{"port": 80, "name": "a", "targetPort": 8080}]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"spec": {"containers": [{"image": "x"}]}}, "patch.spec.containers: an element has no name"),
        ({"spec": {"$pach": "delete"}}, "patch.spec: unknown directive '$pach'; did you mean '$patch'?"),
        ({"spec": {"$patch": "remove"}}, "patch.spec: $patch must be replace, delete, merge, not 'remove'"),
        (
            {"spec": {"tolerations": [{"$patch": "delete", "key": "t"}]}},
            "patch.spec.tolerations: $patch has no effect here",
        ),
        ({"metadata": {"$retainKeys": "x"}}, "patch.metadata.$retainKeys must be a list, not 'x'"),
        ({"$patch": "delete"}, "patch: $patch: delete leaves nothing"),
    ],
)
def test_what_is_no_patch(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        apply_patch(_POD, patch, "patch")
    assert str(caught.value).startswith(message)


def test_the_merge_keys_are_those_of_the_api() -> None:
    """Of everything that a pod, a Job or a Service is made of."""
    validate = package("kubernetes_validate")
    path = Path(validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict" / "_definitions.json"
    known = json.loads(path.read_text())["$defs"]
    keys: dict[str, set[str]] = {}
    seen: set[str] = set()
    todo = [f"io.k8s.api.{name}" for name in ("core.v1.PodTemplateSpec", "batch.v1.JobSpec", "core.v1.Service")]
    while todo:
        name = todo.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        todo += [text.rpartition("/")[2] for text in _references(known[name])]
        for field, schema in (known[name].get("properties") or {}).items():
            if "merge" in schema.get("x-kubernetes-patch-strategy", "") and "x-kubernetes-patch-merge-key" in schema:
                keys.setdefault(field, set()).add(schema["x-kubernetes-patch-merge-key"])
    assert keys.pop("ports") == {"containerPort", "port"}
    keys.pop("conditions", None)  # of a status
    assert len(keys) > 10
    assert keys == {field: {MERGE_KEYS.get(field)} for field in keys}


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [found for value in schema.values() for found in _references(value)]
    return [found for value in schema for found in _references(value)] if isinstance(schema, list) else []


def build(kind: str, **given: Any) -> builder.Manifests:
    spec = JobSpec(argv=("a.py",), nodes=2, resources=Resources(cpus=1, memory_gb=1))
    chosen = least(workload=kind, **given)
    return builder.build(spec, chosen, JOB_ID, delivery.plan_delivery(chosen), target="k")


@pytest.mark.parametrize("kind", KINDS)
def test_pods_of_every_kind_can_be_patched(kind: str) -> None:
    package("kubernetes")
    name = "node" if kind == "trainjob" else "pytorch"
    wanted = {
        "spec": {"runtimeClassName": "nvidia", "containers": [{"name": name, "env": [{"name": "X", "value": "1"}]}]}
    }
    made = [template for each in build(kind, pod_patch=wanted) for _, template in validation.templates(each)]
    assert made
    for template in made:
        assert template["spec"]["runtimeClassName"] == "nvidia"
        assert template["spec"]["containers"][0]["image"]
        assert {"name": "X", "value": "1"} in template["spec"]["containers"][0]["env"]


def _pods(container: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": 1, "template": {"spec": {"containers": [container]}}}


_WORKER = {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"priority": 1}}}}}}


def test_an_object_can_be_patched() -> None:
    package("kubernetes")
    replicas = build("pytorchjob", patch=_WORKER).workload["spec"]["pytorchReplicaSpecs"]
    assert replicas["Worker"]["template"]["spec"]["priority"] == 1
    jobs = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"manualSelector": True}}}]}}
    made = build("jobset", patch=jobs).workload["spec"]["replicatedJobs"]
    assert made[0]["template"]["spec"]["manualSelector"] is True
    master = {"spec": {"pytorchReplicaSpecs": {"Master": _pods({"name": "own", "image": "x"})}}}
    assert list(build("pytorchjob", patch=master).workload["spec"]["pytorchReplicaSpecs"]) == ["Worker", "Master"]
    assert made[0]["template"]["spec"]["completions"] == 2


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("job", {"pod_patch": {"spec": {"nodeSelektor": {}}}}, "pod_patch.spec.nodeSelektor: unknown key; did you"),
        ("job", {"pod_patch": {"spec": {"dns_policy": "None"}}}, "unknown key; did you mean 'dnsPolicy'?"),
        (
            "job",
            {"pod_patch": {"spec": {"hostNetwork": "yes"}}},
            "pod_patch.spec.hostNetwork: input should be a valid boolean",
        ),
        (
            "job",
            {"pod_patch": {"spec": {"containers": [{"name": "pytorch", "$patch": "delete"}]}}},
            "the training container 'pytorch'",
        ),
        (
            "job",
            {"pod_patch": {"metadata": {"labels": {"accel.dev/job-id": "x"}}}},
            "accel.dev/job-id, accel.dev/name cannot",
        ),
        ("job", {"patch": {"spec": {"completionz": 1}}}, "patch: spec.completionz: unknown key"),
        (
            "job",
            {"patch": {"metadata": {"name": "x"}}},
            "patch: metadata.name cannot be changed: accel finds the job by it",
        ),
        ("job", {"patch": {"kind": "Pod"}}, "patch: kind cannot be changed"),
        ("job", {"patch": {"metadata": {"labels": None}}}, "accel.dev/job-id, accel.dev/name cannot be changed"),
        ("pytorchjob", {"patch": {"spec": {"runPolicy": {"ttl": 1}}}}, "patch: spec.runPolicy: unknown key 'ttl'"),
        (
            "pytorchjob",
            {"patch": {"spec": {"pytorchReplicaSpecs": {"Chief": {}}}}},
            "pytorchReplicaSpecs: unknown key 'Chief'",
        ),
        (
            "pytorchjob",
            {"patch": {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"a": 1}}}}}}},
            "patch: spec.pytorchReplicaSpecs.Worker.template.spec.a: unknown key",
        ),
        (
            "jobset",
            {"patch": {"spec": {"failurePolicy": {"maxRestart": 1}}}},
            "'maxRestart'; did you mean 'maxRestarts'?",
        ),
        (
            "jobset",
            {"patch": {"spec": {"failurePolicy": {"rules": [{"name": "a", "onJobFailureReason": []}]}}}},
            "rules[0]: unknown key 'onJobFailureReason'; did you mean 'onJobFailureReasons'?",
        ),
        ("trainjob", {"patch": {"spec": {"trainer": {"nodes": 1}}}}, "spec.trainer: unknown key 'nodes'"),
        (
            "trainjob",
            {"patch": {"spec": {"runtimeRef": {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"}}}},
            "patch: spec.runtimeRef cannot be changed: set `runtime: NAME` in the target instead",
        ),
        (
            "job",
            {"pod_patch": {"spec": {"containers": [{"name": "main", "tty": True}]}}},
            "pod_patch: spec.containers: the pods have no 'main' (they have 'pytorch'), and a new one needs an image",
        ),
        (
            "trainjob",
            {"pod_patch": {"spec": {"initContainers": [{"name": "main", "tty": True}]}}},
            "spec.initContainers: the pods have no 'main' (they have 'accel-code'), and a new one needs an image",
        ),
        (
            "jobset",
            {"patch": {"spec": {"replicatedJobs": [{"name": "main", "replicas": 1}]}}},
            "patch: replicatedJobs[1].template.spec.template: accel creates no such pods, and new ones need containers",
        ),
        (
            "pytorchjob",
            {"patch": {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}}}},
            "patch: spec.pytorchReplicaSpecs.Master.template: accel creates no such pods",
        ),
        (
            "pytorchjob",
            {"patch": {"spec": {"pytorchReplicaSpecs": {"Master": _pods({"name": "pytorch"})}}}},
            "Master.template: spec.containers: the pods have no 'pytorch' (they have none), and a new one needs",
        ),
        (
            "pytorchjob",
            {"patch": {"spec": {"pytorchReplicaSpecs": {"Worker": None}}}},
            "Worker.template: the training container 'pytorch' and its image cannot be removed",
        ),
    ],
)
def test_what_may_not_come_of_it(kind: str, given: dict[str, Any], message: str) -> None:
    package("kubernetes")
    with pytest.raises(SpecError) as caught:
        build(kind, **given)
    assert str(caught.value).startswith("target k: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_patch_of_the_container_that_fetches_large_code() -> None:
    package("kubernetes")
    patch = {"spec": {"initContainers": [{"name": delivery.FETCH, "tty": True}]}}
    store = {"code": "auto", "code_store": {"url": "s3://bucket/team", "image": "aws"}, "pod_patch": patch}
    (pod,) = [template for _, template in validation.templates(build("job", **store).workload)]
    assert [container["name"] for container in pod["spec"]["initContainers"]] == [delivery.CODE_VOLUME]
    with pytest.raises(SpecError, match="the pods have no 'accel-fetch'"):
        build("job", code="configmap", pod_patch=patch)
