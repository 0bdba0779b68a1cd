"""helm/accel-job: its objects are those that the Python builders make of the same facts."""

from __future__ import annotations

import base64
import copy
import dataclasses
import io
import json
import os
import random
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from schedulers import object_names
from schedulers.errors import SpecError
from schedulers.job import JobSpec, Resources, Retry
from schedulers.kubernetes import names
from schedulers.kubernetes.manifests import build
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.kubernetes.options import KubernetesOptions, ObjectStore, Toleration, Volume, check
from schedulers.store.store import full_id

from ..schedulers.kubernetes import strict
from . import charts, checking, helms

CHART = charts.ROOT / "helm/accel-job"
FILES = charts.values_files(CHART)
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
LEAST = charts.load(charts.VALUES / "accel-job/least.yaml")

# Values that have another name, or none, among the builder's options.
_OF_SPEC = set(
    "name jobId entry argv workdir setup env secrets nodes maxNodes procsPerNode resources timeLimit grace maxRestarts "
    "global image".split()
)
_OF_THE_WORLD = set(
    "ACCEL_NODES ACCEL_NODE_RANK ACCEL_MASTER ACCEL_PORT ACCEL_POD_FAILURES JOBSET_RESTART_ATTEMPT".split()
)
_RENAMED = {"startTimeout": "start_timeout_s", "ttl": "ttl_s"}


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values on top of the chart's own."""

    def over(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in more.items():
            known = isinstance(base.get(key), dict) and isinstance(value, Mapping)
            base[key] = over(base[key], value) if known else value
        return base

    return over(charts.load(CHART / "values.yaml"), copy.deepcopy(values))


def spec_of(values: Mapping[str, Any]) -> JobSpec:
    """The job that the values describe."""
    wanted = values["resources"]
    return JobSpec(
        argv=tuple(values["argv"]),
        entry=values["entry"],
        name=values["name"] or helms.RELEASE,
        nodes=values["nodes"],
        max_nodes=values["maxNodes"],
        procs_per_node=values["procsPerNode"],
        resources=Resources(
            gpus=wanted["gpus"],
            cpus=wanted["cpus"],
            memory_gb=wanted["memoryGb"],
            shm_gb=wanted["shmGb"],
            accelerator=wanted["accelerator"] or None,
        ),
        # Helm knows no order of keys.
        env=dict(sorted(values["env"].items())),
        secrets=dict(sorted(values["secrets"].items())),
        workdir=values["workdir"],
        image=values["image"],
        time_limit_s=values["timeLimit"],
        grace_s=values["grace"],
        retry=Retry(max_restarts=values["maxRestarts"]),
    )


def options_of(values: Mapping[str, Any]) -> KubernetesOptions:
    """The options of a target on which `accel submit` would make the same."""
    where = values["code"]
    found: dict[str, Any] = {
        _RENAMED.get(key, snake(key)): value or None if isinstance(value, str) else value
        for key, value in values.items()
        if key not in _OF_SPEC | {"code", "tolerations", "volumes", "setup", "imagePullSecrets"}
    }
    store = {key: value for key, value in where["store"].items() if value}
    return KubernetesOptions(
        **found,
        namespace=helms.NAMESPACE,
        code=where["kind"],
        code_dir=where["dir"] or None,
        code_claim=where["claim"] or None,
        code_store=ObjectStore(**store) if store else None,
        setup=tuple(tuple(argv) for argv in values["setup"]),
        image_pull_secrets=tuple(values["imagePullSecrets"]),
        resources=values["resources"]["other"],
        tolerations=tuple(Toleration(**each) for each in values["tolerations"]),
        volumes=tuple(Volume(**{snake(key): value for key, value in each.items()}) for each in values["volumes"]),
    )


def snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)


def built(values: Mapping[str, Any], job_id: str) -> list[helms.Manifest]:
    """What the builders make. Raises SpecError."""
    spec, options = spec_of(values), options_of(values)
    check(options, "kubernetes")
    data = base64.b64decode(values["code"]["archive"]) or None
    digest = delivery.digest_of(data) if data else values["code"]["digest"]
    code = delivery.choose_delivery(options, len(data or b""), digest, "kubernetes")
    return list(build.build(spec, options, job_id, code, data=data))


def comparable(made: list[helms.Manifest]) -> dict[tuple[str, str], helms.Manifest]:
    """(kind, name) -> the object without the marks of Helm and of `accel submit`."""
    found = {}
    for each in copy.deepcopy(made):
        labels = each["metadata"]["labels"]
        assert labels.pop(names.MANAGED_BY) in ("accel", "Helm")
        marks = ("helm.sh/", names.SPEC)
        notes = {k: v for k, v in each["metadata"].pop("annotations", {}).items() if not k.startswith(marks)}
        each["metadata"] |= {"annotations": notes} if notes else {}
        found[each["kind"], each["metadata"]["name"]] = each
    return found


def differences(chart: object, builders: object, place: str = "") -> Iterator[str]:
    """A line for every place where the chart's objects are not the builders'."""
    if isinstance(chart, dict) and isinstance(builders, dict):
        for key in sorted({*chart, *builders}, key=str):
            yield from differences(chart.get(key, "nothing"), builders.get(key, "nothing"), f"{place}/{key}")
    elif isinstance(chart, list) and isinstance(builders, list) and len(chart) == len(builders):
        for index, (one, other) in enumerate(zip(chart, builders, strict=True)):
            yield from differences(one, other, f"{place}/{index}")
    elif chart != builders or type(chart) is not type(builders):
        yield f"{place}: the chart has {chart!r}, the builders {builders!r}"


def notes(made: helms.Manifest) -> dict[str, str]:
    return made["metadata"].get("annotations") or {}


def job_id(made: list[helms.Manifest]) -> str:
    return str(made[0]["metadata"]["labels"][names.JOB_ID])


def assert_same(helm: helms.Helm, values: Mapping[str, Any]) -> None:
    made = helms.objects(helm.render(CHART, values))
    assert list(differences(comparable(made), comparable(built(whole(values), job_id(made))))) == []


@each_file
def test_the_chart_and_the_builders_make_the_same(helm: helms.Helm, file: Path) -> None:
    assert_same(helm, charts.load(file))


@each_file
def test_accel_finds_the_job_by_what_the_chart_notes_on_it(helm: helms.Helm, file: Path) -> None:
    values = whole(charts.load(file))
    made = helms.objects(helm.render(CHART, charts.load(file)))
    (noted,) = [notes(each)[names.SPEC] for each in made if names.SPEC in notes(each)]
    setup = tuple(tuple(argv) for argv in values["setup"])
    assert JobSpec.from_json(json.loads(noted)) == dataclasses.replace(spec_of(values), setup=setup)
    assert full_id(job_id(made)) == job_id(made)


@each_file
def test_the_operators_would_take_them(helm3: helms.Helm3, file: Path) -> None:
    for made in helms.objects(helm3.render_for_cluster(CHART, charts.load(file))):
        checking.without_newer(made)
        # A hook's annotations are Helm's, and any object may have them.
        assert [strict.errors(made, version) for version in checking.VERSIONS] == [[], []], made["kind"]


@pytest.mark.parametrize("workload", ["pytorchjob", "jobset", "job", "trainjob"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"nodes": 3, "maxRestarts": 2},
        {"code": {"kind": "pvc", "claim": "c", "digest": "0" * 64}, "cpu": True, "setup": [["a b", "c"]]},
        {"resources": {"gpus": 4, "accelerator": "T4"}, "suspend": True, "serviceAccount": "a"},
        {"volcanoQueue": "q", "podSecurity": "baseline", "entry": "module", "python": "/p"},
    ],
    ids=["least", "nodes", "code", "gpus", "volcano"],
)
def test_every_workload_takes_every_option(helm3: helms.Helm3, workload: str, more: Mapping[str, Any]) -> None:
    assert_same(helm3, {**LEAST, "workload": workload, **more})


def test_code_in_the_values_is_split_as_the_builders_split_it(helm: helms.Helm) -> None:
    data = random.Random(1).randbytes((768 << 10) + 5)
    values = {**LEAST, "code": {"kind": "configmap", "archive": base64.b64encode(data).decode()}}
    made = helms.objects(helm.render(CHART, values))
    assert sorted(o["metadata"]["name"][-6:] for o in made if o["kind"] == "ConfigMap") == ["code-0", "code-1"]
    assert list(differences(comparable(made), comparable(built(whole(values), job_id(made))))) == []


def test_code_in_the_values_can_be_unpacked(helm3: helms.Helm3, tmp_path: Path) -> None:
    """The chart's own copy of the unpacking program, with the words of the rendered pod, but for its directories."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        about = tarfile.TarInfo("train.py")
        about.size = 5
        tar.addfile(about, io.BytesIO(b"1 + 1"))
    archive = base64.b64encode(packed.getvalue()).decode()
    text = helm3.render(CHART, {**LEAST, "code": {"kind": "configmap", "archive": archive}})
    words = checking.pods(helms.objects(text))[0]["initContainers"][0]["command"]
    (code,) = [each for each in helms.objects(text) if each["kind"] == "ConfigMap"]
    (tmp_path / "code-0").write_bytes(base64.b64decode(code["binaryData"]["code-0"]))
    moved = [word.replace("/accel-code", str(tmp_path)).replace("/accel/code", f"{tmp_path}/code") for word in words]
    assert os.spawnvp(os.P_WAIT, moved[0], moved) == 0
    assert (tmp_path / "code/train.py").read_text() == "1 + 1"


@each_file
def test_pods_are_restricted_unless_told_otherwise(helm3: helms.Helm3, file: Path) -> None:
    values = whole(charts.load(file))
    pods = checking.pods(helms.objects(helm3.render_for_cluster(CHART, values)))
    assert pods
    numbered = {"securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}}
    for pod in pods if values["podSecurity"] == "restricted" else []:
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"].items() >= numbered["securityContext"].items()
            # What the standard asks of a pod each of its containers may say for itself.
            assert checking.unrestricted({**pod, **numbered, "initContainers": [], "containers": [container]}) == []


def test_other_values_are_another_job(helm: helms.Helm) -> None:
    ids = [
        job_id(helms.objects(helm.render(CHART, {**LEAST, **more}, release, namespace)))
        for more, release, namespace in [
            ({}, "a", "x"), ({}, "a", "x"), ({}, "b", "x"), ({"grace": 31}, "a", "x"), ({}, "a", "y")
        ]
    ]  # fmt: skip
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("release", "name"), [("train", "train"), ("2026.run.a", "run-a"), ("7", "job"), ("x" * 53, "x" * 28)]
)
def test_the_name_comes_from_the_release(helm: helms.Helm, release: str, name: str) -> None:
    made = helms.objects(helm.render(CHART, LEAST, release))[0]
    assert made["metadata"]["name"] == f"{name}-{job_id([made])}"
    assert len(made["metadata"]["name"]) <= object_names.MAX_LENGTH


def test_kubectl_makes_the_runtime_before_the_train_job_and_runs_no_test(helm: helms.Helm) -> None:
    """It makes objects in their order, and knows no hooks."""
    made = helms.objects(helm.render(CHART, {**LEAST, "workload": "trainjob"}))
    assert [(each["kind"], sorted(notes(each))) for each in made] == [
        ("TrainingRuntime", []),
        ("TrainJob", [names.SPEC]),
    ]


def test_helm_makes_the_runtime_and_waits_for_a_controller_before_the_train_job(helm3: helms.Helm3) -> None:
    made = helms.objects(helm3.render_for_cluster(CHART, {**LEAST, "workload": "trainjob"}))
    hooks = helms.hooked(made, "pre-install")
    assert hooks == helms.hooked(made, "pre-upgrade")
    runtime, turn = hooks
    assert runtime["kind"] == "TrainingRuntime"
    assert (turn["kind"], turn["spec"]["completions"], turn["spec"]["parallelism"]) == ("Job", 0, 0)
    weights = [int(notes(each)["helm.sh/hook-weight"]) for each in hooks]
    assert sorted(set(weights)) == weights
    (job,) = [each for each in made if each["kind"] == "TrainJob"]
    assert set(notes(job)) == {names.SPEC}


@each_file
def test_the_charts_own_test_looks_into_the_jobs_pod(helm3: helms.Helm3, file: Path) -> None:
    values = whole(charts.load(file))
    job = checking.pods(helms.objects(helm3.render(CHART, values)))[0]
    (test,) = checking.pods(helms.hooked(helms.objects(helm3.render_for_cluster(CHART, values)), "test"))
    alike = ("image", "securityContext", "workingDir", "env")
    inside, trains = test["containers"][0], job["containers"][0]
    own = [each for each in trains["env"] if each["name"] not in _OF_THE_WORLD]
    assert {key: inside.get(key) for key in alike} == {key: trains.get(key) for key in alike} | {"env": own}
    assert inside["command"][-3:] == ["/accel-check/check.py", values["entry"], values["argv"][0].replace("$", "$$")]
    assert len(test.get("initContainers", [])) == len(job.get("initContainers", []))
    assert all("nvidia.com/gpu" not in str(each["resources"]) for each in (inside, *test.get("initContainers", [])))


@pytest.mark.parametrize("workload", ["job", "jobset"])
@pytest.mark.parametrize(("version", "old"), [("1.27.9", True), ("v1.27.9-gke.1", True), ("1.28.0", False)])
def test_a_job_with_restarts_needs_a_limit_for_each_index(
    helm3: helms.Helm3, workload: str, version: str, old: bool
) -> None:
    values = {**LEAST, "workload": workload, "maxRestarts": 1}
    if old and workload == "job":
        with pytest.raises(helms.Refused, match=r"maxRestarts: .* needs Kubernetes 1\.28 .* the cluster has v1\.27\.9"):
            helm3.render_for_cluster(CHART, values, version)
    else:
        assert ("backoffLimitPerIndex" in helm3.render_for_cluster(CHART, values, version)) is (workload == "job")


# Values that the chart and the builders both refuse, and what the chart says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"maxNodes": 4, "workload": "jobset"}, "only a PyTorchJob may grow"),
    ({"maxNodes": 1, "nodes": 2}, "maxNodes must not be less"),
    ({"queue": "a", "volcanoQueue": "b"}, "remove one"),
    ({"queuePriority": "a"}, "queuePriority needs queue"),
    ({"workload": "trainjob", "ttl": 1}, "not supported by TrainJobs"),
    ({"cpu": True, "resources": {"gpus": 1}}, "remove one"),
    ({"resources": {"accelerator": "T4"}}, "needs resources.gpus"),
    ({"resources": {"gpus": 1, "accelerator": "T4"}, "accelerators": {"A": {"a": "b"}, "B": {"a": "b"}}}, "has A, B"),
    ({"resources": {"other": {"nvidia.com/gpu": 1}}}, "nvidia.com/gpu has a value of its own"),
    ({"env": {"A": "1"}, "secrets": {"A": "secret:a/b"}}, "A is in both"),
    ({"labels": {"accel.dev/job-id": "x"}}, "sets accel.dev/job-id itself"),
    ({"hostNetwork": True}, "hostNetwork needs podSecurity: privileged, not restricted"),
    ({"ipcLock": True, "podSecurity": "baseline"}, "ipcLock needs podSecurity: privileged, not baseline"),
    ({"volumes": [{"mount": "/a", "hostPath": "/a"}]}, "/a: a directory of the node"),
    ({"volumes": [{"mount": "/a", "source": {"hostPath": {"path": "/a"}}}]}, "/a: a directory of the node"),
    ({"runAsUser": 0}, "0 is root"),
    ({"volumes": [{"mount": "/dev/shm/", "claim": "a"}]}, "/dev/shm/ is mounted already"),
    ({"volumes": [{"mount": "/accel/code", "claim": "a"}]}, "/accel/code is mounted already"),
    ({"volumes": [{"mount": "//x/../accel/code/", "claim": "a"}]}, "//x/../accel/code/ is mounted already"),
    ({"volumes": [{"mount": "/a", "claim": "a"}, {"mount": "/a/", "claim": "a"}]}, "/a/ is mounted already"),
    ({"volumes": [{"mount": "/a"}]}, "volumes"),
    ({"volumes": [{"mount": "/a", "claim": "a", "secret": "b"}]}, "volumes"),
    ({"volumes": [{"mount": "a", "claim": "a"}]}, "volumes"),
    ({"volumes": [{"mount": "/a", "nfs": "a"}]}, "volumes"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "takes no value"),
    ({"tolerations": [{"value": "b"}]}, "needs a key"),
    ({"tolerations": [{"key": "a", "seconds": 1}]}, "needs effect: NoExecute"),
    ({"code": {"kind": "pvc", "digest": "0" * 64}}, "needs code.claim"),
    ({"code": {"kind": "store", "digest": "0" * 64}}, "needs code.store.url"),
    ({"code": {"kind": "pvc", "claim": "a", "digest": "0" * 64, "dir": "/a"}}, "needs code.kind: image"),
    ({"workdir": "a"}, "set code.dir"),
    ({"serviceAccount": "A"}, "serviceAccount"),
    ({"nodes": 0}, "nodes"),
    ({"timeLimit": 0}, "timeLimit"),
    ({"argv": []}, "argv: nothing to run"),
    ({"image": ""}, "image: no container image"),
    ({"secrets": {"A": "env:A"}}, "secrets"),
    ({"env": {"1A": "x"}}, "1A"),
    ({"nodeSelector": {"a": "b c"}}, "nodeSelector"),
    ({"gpuResource": "gpu"}, "gpuResource"),
    ({"resources": {"other": {"a": "1 GB"}}}, "other"),
    ({"imagePullSecrets": ["A"]}, "imagePullSecrets"),
]


@pytest.mark.parametrize(
    ("more", "line"), REFUSED, ids=[f"{'-'.join(more)}-{i}" for i, (more, _) in enumerate(REFUSED)]
)
def test_chart_and_builders_refuse_the_same(helm: helms.Helm, more: Mapping[str, Any], line: str) -> None:
    values = {**LEAST, **more}
    with pytest.raises(helms.Refused, match=line):
        helm.render(CHART, values)
    with pytest.raises(SpecError):
        built(whole(values), "2mxaaaaaaaa")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ({"kind": "configmap"}, "needs code.archive"),
        ({"archive": "YQ=="}, "needs code.kind: configmap"),
        ({"kind": "configmap", "archive": "not base64"}, "archive"),
        ({"kind": "pvc", "claim": "a"}, "needs code.digest"),
        ({"kind": "pvc", "claim": "a", "digest": "12"}, "digest"),
    ],
)
def test_code_that_is_not_there_is_refused(helm: helms.Helm, code: Mapping[str, Any], line: str) -> None:
    with pytest.raises(helms.Refused, match=line):
        helm.render(CHART, {**LEAST, "code": code})
