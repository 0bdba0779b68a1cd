"""The objects of a job: held by golden files, a kind and API version each, and refused before any cluster is asked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import JobSpec, Resources, Retry, SpecError, object_names
from schedulers.kubernetes import names
from schedulers.kubernetes.manifests import build as builder
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.kubernetes.manifests import pods, validate
from schedulers.kubernetes.manifests.code_delivery import Code
from schedulers.kubernetes.options import Volume
from schedulers.kubernetes.preflight import required_permissions
from tests.golden import assert_golden
from tests.schedulers.kubernetes.strict import errors
from tests.schedulers.kubernetes.support import IMAGE, JOB_ID, KINDS, everything, everything_spec, least, options

_CODE = Code(kind="configmap", digest="0" * 64)


def build(spec: JobSpec, chosen: Any, code: Code = _CODE, **more: Any) -> builder.Manifests:
    return builder.build(spec, chosen, JOB_ID, code, target="k", **more)


def golden(name: str, made: builder.Manifests) -> None:
    assert_golden(f"kubernetes/{name}.yaml", builder.to_yaml(list(made)))


@pytest.mark.parametrize("kind", KINDS)
def test_everything(kind: str) -> None:
    made = build(everything_spec(), everything(kind))
    version = str(made.workload["apiVersion"]).replace("/", "_")
    golden(f"{kind}_{version}", made)


@pytest.mark.parametrize("kind", KINDS)
def test_the_least(kind: str) -> None:
    golden(f"{kind}_least", build(JobSpec(argv=("train.py",), name="train"), least(workload=kind)))


def test_a_world_that_may_grow() -> None:
    spec = JobSpec(argv=("train.py",), name="train", nodes=2, max_nodes=8, retry=Retry(max_restarts=3))
    golden("pytorchjob_elastic", build(spec, least()))


@pytest.mark.parametrize("kind", ["pytorchjob", "job", "jobset", "trainjob"])
def test_volcano(kind: str) -> None:
    spec = JobSpec(argv=("train.py",), name="train", nodes=2)
    golden(f"{kind}_volcano", build(spec, least(workload=kind, volcano_queue="research", code="image")))


def test_a_runtime_of_the_cluster() -> None:
    """The TrainJob has everything itself, and no TrainingRuntime."""
    own = dict.fromkeys(("priority_class", "image_pull_policy"), None) | {"host_network": False}
    chosen = everything("trainjob", runtime="torch-distributed", code="image", code_dir="/app", **own)
    manifests = build(everything_spec(retry=Retry()), chosen, Code(kind="image"))
    assert [manifest["kind"] for manifest in manifests] == ["Service", "TrainJob"]
    assert errors(manifests.workload) == []
    golden("trainjob_runtime", manifests)
    assert ("trainer.kubeflow.org", "trainingruntimes") not in required_permissions(chosen)
    with pytest.raises(SpecError, match="--max-restarts: a TrainJob cannot set it"):
        build(everything_spec(), chosen, Code(kind="image"))
    spec = JobSpec(argv=("a.py", "$(A)"))
    plan = builder.plan(spec, least(workload="trainjob", runtime="torch", code="image"), JOB_ID, "k")
    assert plan.actions[-1][:2] + plan.actions[-1][-2:] == ("accel", "launch", "a.py", "$(A)")


@pytest.mark.parametrize("where", ["pvc", "store"])
def test_code_from_elsewhere(where: str) -> None:
    store = {"url": "s3://bucket/code/", "image": "example.org/aws:2", "secret": "s3", "endpoint": "https://minio:9000"}
    chosen = least(workload="job", code=where, code_claim="snapshots", code_store=store)
    golden(f"job_{where}", build(JobSpec(argv=("train.py",), name="train"), chosen, Code(kind=where, digest="0" * 64)))  # type: ignore[arg-type]


def test_the_yaml_is_the_objects() -> None:
    made = list(build(everything_spec(), everything("job")))
    assert list(yaml.safe_load_all(builder.to_yaml(made))) == made
    texts = builder.files(build(everything_spec(), everything("trainjob")))
    assert list(texts) == [
        "kubernetes/0-trainingruntime.yaml", "kubernetes/1-service.yaml", "kubernetes/2-trainjob.yaml"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_arrive_bit_for_bit(kind: str) -> None:
    """As the kubelet expands them: `$$` is `$`, and `$(NAME)` a variable."""
    spec = everything_spec(setup=())
    for made in build(spec, least(workload=kind, accelerators={"h100": {"a": "b"}})):
        for _, template in validate.templates(made):
            container = template["spec"]["containers"][0]
            words = [expanded(word) for word in container["command"]]
            assert words[words.index("--") + 1 :] == list(spec.argv)
            assert {"name": "PRICE", "value": "$$(A)"} in container["env"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30), max_size=4))
def test_any_text_arrives(words: list[str]) -> None:
    spec = JobSpec(argv=("a.py", *words))
    made = build(spec, least(workload="job", code="image"), Code(kind="image")).workload
    assert next(yaml.safe_load_all(builder.to_yaml([made]))) == made
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [expanded(word) for word in command][-len(spec.argv) :] == list(spec.argv)


def expanded(text: str) -> str:
    """`third_party/forked/golang/expansion` of Kubernetes, with no variable set."""
    out, at = "", 0
    while at < len(text):
        if text[at] == "$" and text[at + 1 : at + 2] == "$":
            out, at = out + "$", at + 2
        else:
            assert text[at : at + 2] != "$(", "a variable would be looked up"
            out, at = out + text[at], at + 1
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_in_a_manifest_and_pods_are_restricted(kind: str) -> None:
    spec = JobSpec(argv=("a.py",), nodes=2, secrets={"T": "secret:keys/token"})
    for made in build(spec, least(workload=kind)):
        for _, template in validate.templates(made):
            inside = template["spec"]
            ref = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}}
            assert ref in inside["containers"][0]["env"]
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(inside)
            assert all(set(volume) & {"emptyDir", "projected"} for volume in inside["volumes"])
            for container in (*inside["initContainers"], *inside["containers"]):
                assert container["securityContext"] == {
                    "runAsNonRoot": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                }


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_found_by_the_job_id(kind: str) -> None:
    data = b"x" * (800 << 10)
    code = delivery.choose_delivery(least(), len(data), delivery.digest_of(data), "k")
    made = build(JobSpec(argv=("a.py",)), least(workload=kind, volcano_queue="q"), code, data=data)
    assert sum(each["kind"] == "ConfigMap" for each in made) == 2 == code.parts
    for each in made:
        assert each["metadata"]["labels"][names.JOB_ID] == JOB_ID
        assert each["metadata"]["name"].startswith(object_names.object_name("job", JOB_ID))
        for _, template in validate.templates(each):
            assert template["metadata"]["labels"][names.JOB_ID] == JOB_ID


def test_the_digest_is_of_the_object_as_built() -> None:
    spec = JobSpec(argv=("a.py",))
    made = build(spec, least()).workload
    stamped = builder.with_digest(made, spec)
    notes = stamped["metadata"]["annotations"]
    assert notes[names.DIGEST] == builder.digest(made) == builder.digest(json.loads(json.dumps(made)))
    assert JobSpec.from_json(json.loads(notes[names.SPEC])) == spec
    other = build(dataclasses.replace(spec, argv=("b.py",)), least()).workload
    assert builder.digest(other) != builder.digest(made)


def test_how_often_a_gang_starts_again() -> None:
    spec = JobSpec(argv=("a.py",), nodes=4, retry=Retry(max_restarts=3))
    once = JobSpec(argv=("a.py",), nodes=4)
    assert build(spec, least()).workload["spec"]["runPolicy"]["backoffLimit"] == 13
    assert "backoffLimit" not in build(once, least()).workload["spec"]["runPolicy"]
    restarts = [
        each["restartPolicy"]
        for made in (spec, once)
        for each in build(made, least()).workload["spec"]["pytorchReplicaSpecs"].values()
    ]
    assert restarts == ["OnFailure", "Never"]
    assert build(spec, least(workload="job")).workload["spec"]["backoffLimit"] == 12
    policy = build(spec, least(workload="jobset")).workload["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (3, "BlockingRecreate")
    assert policy["rules"][0]["onJobFailureReasons"] == ["DeadlineExceeded", "PodFailurePolicy"]


def test_one_node_has_a_master_only() -> None:
    def replicas(nodes: int) -> dict[str, int]:
        found = build(JobSpec(argv=("a.py",), nodes=nodes), least()).workload["spec"]["pytorchReplicaSpecs"]
        return {role: each["replicas"] for role, each in found.items()}

    assert replicas(1) == {"Master": 1}
    assert replicas(5) == {"Worker": 5}


def test_a_user_without_a_home_gets_one() -> None:
    def env(**given: Any) -> dict[str, str]:
        made = build(JobSpec(argv=("a.py",), env={"HOME": "/mine"}), least(workload="job", **given))
        _, template = next(validate.templates(made.workload))
        return {each["name"]: each.get("value", "") for each in template["spec"]["containers"][0]["env"]}

    assert env(run_as_user=1000)["HOME"] == "/mine"
    assert env(run_as_user=1000)["USER"] == "accel"
    assert "USER" not in env()


@pytest.mark.parametrize(
    ("gpu", "resource", "label"),
    [
        ("nvidia", "nvidia.com/gpu", "nvidia.com/gpu.product"),
        ("amd", "amd.com/gpu", "amd.com/gpu.product-name"),
        ("gaudi", "habana.ai/gaudi", "node.kubernetes.io/instance-type"),
        ("tpu", "google.com/tpu", "cloud.google.com/gke-tpu-accelerator"),
    ],
)
def test_gpus_of_other_makes(gpu: str, resource: str, label: str) -> None:
    spec = JobSpec(argv=("a.py",), resources=Resources(gpus=4, accelerator="fast"))
    inside = pods.template(spec, least(gpu=gpu), "n", JOB_ID, _CODE)["spec"]
    assert inside["containers"][0]["resources"] == {"requests": {resource: "4"}, "limits": {resource: "4"}}
    assert "resources" not in inside["initContainers"][0]
    assert inside["nodeSelector"] == {label: "fast"}
    assert inside["tolerations"] == [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("said", "spec", "message"),
    [
        ({}, {"after": ("x",)}, "target k: --after is not supported on Kubernetes"),
        ({"image": None}, {}, "target k: no container image: use --image"),
        ({"cpu": True}, {"resources": Resources(gpus=1)}, "cpu: true in target k and --gpus contradict each other"),
        ({}, {"resources": Resources(accelerator="h100")}, "--accelerator needs --gpus"),
        (
            {"accelerators": {"h100": {"a": "b"}}},
            {"resources": Resources(gpus=1, accelerator="h10")},
            "--accelerator h10: accelerators has h100; did you mean 'h100'?",
        ),
        ({}, {"secrets": {"T": "env:T"}}, "target k reads the cluster's Secrets only, as secret:NAME/KEY"),
        ({}, {"secrets": {"T": "secret:a"}}, "--secret T: target k expects secret:NAME/KEY"),
        ({}, {"env": {"ACCEL_NODES": "3"}}, "accel sets ACCEL_NODES itself"),
        ({}, {"argv": ("a.py", "\udcff")}, "is not UTF-8, which the cluster requires"),
        ({"workload": "job"}, {"nodes": 2, "max_nodes": 4}, "only a PyTorchJob may grow, not workload job"),
        ({}, {"image": "a b:1"}, "target k: --image must be one word, not 'a b:1'"),
        (
            {"affinity": {"nodeAffinty": {}}},
            {},
            "target k: affinity.nodeAffinty: unknown key; did you mean 'nodeAffinity'?",
        ),
        ({"affinity": {"node_affinity": {}}}, {}, "target k: affinity.node_affinity: unknown key; did you mean"),
        ({"affinity": {"nodeAffinity": "near"}}, {}, "target k: affinity.nodeAffinity: input should be a valid"),
        (
            {"volumes": [{"mount": "/x", "source": {"cis": {}}}]},
            {},
            "target k: volumes: /x: source.cis: unknown key; did you mean 'csi'?",
        ),
        ({"code": "image"}, {"workdir": "src"}, "the job runs in 'src' of its code: set code_dir"),
    ],
)  # fmt: skip
def test_what_no_object_can_be(said: dict[str, Any], spec: dict[str, Any], message: str) -> None:
    chosen = options(**({"image": IMAGE} | said))
    wanted = JobSpec(**({"argv": ("a.py",)} | spec))
    with pytest.raises(SpecError) as caught:
        build(wanted, chosen, delivery.plan_delivery(chosen))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_warnings() -> None:
    spec = JobSpec(argv=("a.py",), nodes=2, time_limit_s=60, retry=Retry(max_restarts=1))
    found = builder.warnings(spec, least())
    assert [line.split(":")[0] for line in found] == [
        "a PyTorchJob's time limit counts from its first start, over all attempts together",
        "--cpus or --memory is not set",
    ]
    enough = JobSpec(argv=("a.py",), nodes=2, resources=Resources(cpus=1, memory_gb=1), time_limit_s=60)
    assert builder.warnings(enough, least(workload="jobset")) == ()
    again = dataclasses.replace(enough, retry=Retry(max_restarts=1))
    (line,) = builder.warnings(again, least(workload="jobset"))
    assert line == "each attempt of a JobSet has the whole time limit; the first that exceeds it is the last"


def test_a_world_that_may_grow_and_is_not_restarted() -> None:
    spec = JobSpec(argv=("a.py",), nodes=2, max_nodes=8, resources=Resources(cpus=1, memory_gb=1))
    (line,) = builder.warnings(spec, least())
    assert line.startswith("--nodes 2:8 without --max-restarts: pods may join, but the loss of one")
    assert builder.warnings(dataclasses.replace(spec, retry=Retry(max_restarts=1)), least()) == ()


def _containers(made: builder.Manifests) -> list[dict[str, Any]]:
    (template, *_) = [found for each in made for _, found in validate.templates(each)]
    inside = template["spec"]
    return [*inside["initContainers"], *inside["containers"]]


@pytest.mark.parametrize("workload", KINDS)
def test_words_with_control_characters(workload: str) -> None:
    """Trainer's controller reads no such character; the words arrive all the same."""
    spec = JobSpec(argv=("a.py", "\x01\x7f\x85 $(A)\r"), env={"WORD": "\x1b[0m $(A)", "LINES": "a\n\tb"})
    container = _containers(build(spec, least(workload=workload, python=sys.executable)))[-1]
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    words, given = (
        [expanded(word) for word in container["command"]],
        {key: expanded(value) for key, value in given.items()},
    )
    if workload == "trainjob":
        text = "".join((*words, *given.values())).replace("\n", "").replace("\t", "")
        assert text.isprintable()
        shown = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
        words[3] = json.dumps({**json.loads(words[3]), "argv": [sys.executable, "-c", shown, *spec.argv]})
        arrived, given = json.loads(subprocess.check_output(words, env=given))
        assert arrived == list(spec.argv)
    else:
        assert words[-1] == spec.argv[-1]
    assert {key: given[key] for key in spec.env} == spec.env


@pytest.mark.parametrize("workload", KINDS)
def test_a_root_file_system_that_is_read_only(workload: str) -> None:
    """/tmp and HOME are the pod's own, in each container that may write there."""
    made = build(JobSpec(argv=("a.py",)), least(workload=workload, read_only_root_filesystem=True))
    for container in _containers(made):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"name": "accel-tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["HOME"] == "/accel/home"
    assert {"name": "accel-home", "mountPath": "/accel/home"} in container["volumeMounts"]
    mine = least(workload=workload, read_only_root_filesystem=True, volumes=(Volume(mount="/tmp/", claim="scratch"),))
    assert [each["mountPath"] for each in _containers(build(JobSpec(argv=("a.py",)), mine))[-1]["volumeMounts"]].count(
        "/tmp"
    ) == 0
    for container in _containers(build(JobSpec(argv=("a.py",)), least(workload=workload))):
        assert "readOnlyRootFilesystem" not in container["securityContext"]


def test_setup_needs_a_root_file_system_that_can_be_written() -> None:
    install = (("pip", "install", "x"),)
    said = "setup cannot install anything with read_only_root_filesystem"
    with pytest.raises(SpecError, match=said):
        build(JobSpec(argv=("a.py",), setup=install), least(read_only_root_filesystem=True))
    with pytest.raises(SpecError, match=said):
        least(read_only_root_filesystem=True, setup=install)


@pytest.mark.parametrize("workload", KINDS)
def test_the_end_of_what_a_container_of_the_code_prints_is_kept(workload: str) -> None:
    for container in _containers(build(JobSpec(argv=("a.py",)), least(workload=workload))):
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize("workload", KINDS)
def test_node_0_has_a_name_before_any_pod(workload: str) -> None:
    def first(**given: Any) -> list[str]:
        made = build(JobSpec(argv=("a.py",), name="train", **given), least(workload=workload))
        return [each["metadata"]["name"] for each in made.first if each["kind"] == "Service"]

    assert first(nodes=2) == [f"train-{JOB_ID}-rendezvous"]
    assert first() == []
    if workload == "pytorchjob":
        assert first(nodes=1, max_nodes=4) == [f"train-{JOB_ID}-rendezvous"]


@pytest.mark.parametrize("workload", KINDS)
def test_the_clusters_time_limit_is_behind_the_launchers(workload: str) -> None:
    spec = JobSpec(argv=("a.py",), time_limit_s=60, grace_s=10)
    made = build(spec, least(workload=workload))
    assert "'activeDeadlineSeconds': 370" in str(made.workload)
    env = {each["name"]: each.get("value") for each in _containers(made)[-1]["env"]}
    assert (env["ACCEL_TIME_LIMIT"], env["ACCEL_TIME_LIMIT_EXIT"]) == ("60", "86,0")
