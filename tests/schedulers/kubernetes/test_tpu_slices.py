"""Slices of TPUs on GKE: their objects, the nodes that follow from a topology, and a line for what cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exit_status, main
from schedulers import JobSpec, Resources, SpecError, State, Topology
from schedulers.jobs.handle import submit_spec
from schedulers.kubernetes import names, tpu_slices
from schedulers.kubernetes.manifests import build, validate
from schedulers.kubernetes.manifests.code_delivery import Code
from schedulers.kubernetes.options import TPU_LABEL, TPU_RESOURCE, TPU_TOPOLOGY, KubernetesOptions
from schedulers.kubernetes.status import job_states
from tests.clusters.kube.client import MERGE
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.golden import assert_golden
from tests.schedulers.kubernetes import strict
from tests.schedulers.kubernetes.support import JOB_ID, least, options

from .conftest import printed

V5P = Resources(gpus=4, accelerator="tpu-v5p-slice")


def slices(**given: Any) -> KubernetesOptions:
    return least(**({"workload": "jobset", "gpu": "tpu", "tpu_topology": "2x2x2"} | given))


def objects(given: KubernetesOptions, **more: Any) -> list[dict[str, Any]]:
    wanted: dict[str, Any] = {"argv": ("train.py",), "name": "train", "resources": V5P} | more
    spec = tpu_slices.with_slice_nodes(JobSpec(**wanted), given)
    return list(build.build(spec, given, JOB_ID, Code(kind="configmap", digest="0" * 64), target="k"))


@pytest.mark.parametrize("count", [1, 2])
def test_the_objects(count: int) -> None:
    made = objects(slices(slices=count))
    assert_golden(f"kubernetes/jobset_slices_{count}.yaml", build.to_yaml(made))
    assert [line for each in made for line in strict.errors(each)] == []


def test_a_job_has_one_slice() -> None:
    made = objects(slices(workload="job"))
    (job,) = [each for each in made if each["kind"] == "Job"]
    assert (job["spec"]["completions"], job["spec"]["template"]["spec"]["subdomain"]) == (2, f"train-{JOB_ID}")
    assert [line for each in made for line in strict.errors(each)] == []


def test_pods_may_lock_the_memory_that_google_says() -> None:
    manifests = objects(slices(ipc_lock=True, pod_security="privileged", setup=(("pip", "list"),)))
    (jobset,) = [manifest for manifest in manifests if manifest["kind"] == "JobSet"]
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"add": ["SYS_RESOURCE"]}
    assert container["command"][:2] == ["sh", "-c"]
    assert container["command"][2].splitlines() == ["set -e", "ulimit -l 68719476736", "pip list", 'exec "$$@"']
    assert [line for manifest in manifests for line in strict.errors(manifest)] == []


@pytest.mark.parametrize(
    ("topology", "accelerator", "chips", "nodes"),
    [
        ("2x2x1", "tpu-v4-podslice", 4, 1),
        ("2x2x4", "tpu-v4-podslice", 4, 4),
        ("1x1", "tpu-v5-lite-podslice", 1, 1),
        ("2x4", "tpu-v5-lite-podslice", 8, 1),
        ("2x4", "tpu-v6e-slice", 4, 2),
        ("16x16", "tpu-v6e-slice", 4, 64),
        ("4x4x4", "tpu7x", 4, 16),
        ("2x3", "tpu-of-tomorrow", 2, 3),
    ],
)
def test_the_nodes_follow(topology: str, accelerator: str, chips: int, nodes: int) -> None:
    given = slices(tpu_topology=topology)
    made = objects(given, resources=Resources(gpus=chips, accelerator=accelerator))
    (workload,) = [each for each in made if each["kind"] == "JobSet"]
    assert job_states.nodes_of(workload) == nodes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tpu_topology": "2x2x2x2"}, "tpu_topology must be like 4x4 or 2x2x2, not '2x2x2x2'"),
        ({"tpu_topology": "0x2"}, "tpu_topology must be like 4x4 or 2x2x2, not '0x2'"),
        ({"gpu": "nvidia"}, "tpu_topology needs gpu: tpu, not nvidia"),
        ({"workload": "pytorchjob"}, "tpu_topology needs workload: jobset or job, not pytorchjob"),
        ({"workload": "job", "slices": 2}, "slices: 2 needs workload: jobset, not job"),
        ({"slices": 0}, "slices must be 1 or more, not 0"),
        ({"slices": 2, "tpu_topology": None}, "slices: 2 needs tpu_topology, the topology of each slice"),
        ({"gpu_resource": "a/b"}, "gpu_resource: slices always use google.com/tpu: leave it out"),
        ({"gpu_label": "a/b"}, "gpu_label: slices always use cloud.google.com/gke-tpu-accelerator: leave it out"),
        ({"node_selector": {TPU_TOPOLOGY: "4x4"}}, "gke-tpu-topology is set by tpu_topology: leave it out"),
    ],
)
def test_options_that_cannot_be_meant(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        slices(**given)
    assert str(caught.value).startswith("target k: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "spec", "message"),
    [
        ({}, {"resources": Resources()}, "tpu_topology 2x2x2 needs --gpus, the chips of one host (google.com/tpu)"),
        ({}, {"resources": Resources(gpus=4)}, "needs --accelerator, the nodes' label cloud.google.com/gke-tpu-acce"),
        ({"tpu_topology": "4x4"}, {}, "tpu_topology 4x4: a tpu-v5p-slice has 3 dimensions"),
        ({"tpu_topology": "1x1x1"}, {}, "tpu_topology 1x1x1: tpu-v5p-slice has no such topology"),
        ({}, {"resources": Resources(gpus=8, accelerator="tpu-v5p-slice")}, "--gpus 8: each host of a tpu-v5p-slice of "
         "2x2x2 has 4 chips"),
        ({"tpu_topology": "2x4"}, {"resources": Resources(gpus=1, accelerator="tpu-v6e-slice")},
         "--gpus 1: each host of a tpu-v6e-slice of 2x4 has 4 or 8 chips"),
        ({}, {"resources": Resources(gpus=3, accelerator="tpu8")}, "--gpus 3: not a divisor of the 8 chips of "
         "tpu_topology 2x2x2"),
        ({"slices": 2, "tpu_topology": "2x2x1"}, {}, "several slices need several hosts each, and 2x2x1 is one"),
        ({}, {"nodes": 3}, "--nodes 3: a slice of 2x2x2 has 2 hosts of 4 chips; leave it out"),
        ({"slices": 3}, {"nodes": 2}, "--nodes 2: 3 slices of 2x2x2 have 6 hosts of 4 chips; leave it out"),
        ({"slices": 2}, {"env": {"MEGASCALE_SLICE_ID": "0"}}, "accel sets MEGASCALE_SLICE_ID itself"),
        ({}, {"nodes": 2, "max_nodes": 4}, "only a PyTorchJob may grow, not workload jobset"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be(given: dict[str, Any], spec: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        objects(slices(**given), **spec)
    assert str(caught.value).startswith("target k: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kind_of_nodes_that_is_not_known_is_a_warning() -> None:
    spec = JobSpec(argv=("a.py",), nodes=2, resources=Resources(gpus=4, accelerator="tpu-v5p-slices"))
    assert "tpu-v6e-slice; did you mean 'tpu-v5p-slice'?" in " ".join(build.warnings(spec, slices()))
    known = dataclasses.replace(spec, resources=V5P)
    assert not any("--accelerator" in line for line in build.warnings(known, slices()))


def test_the_rank_of_a_pod_of_several_slices() -> None:
    """What its variables say to the launcher, and its labels to whoever follows the job."""
    (workload,) = [each for each in objects(slices(slices=3)) if each["kind"] == "JobSet"]
    (_, template) = next(validate.templates(workload))
    env = {each["name"]: each.get("value", "") for each in template["spec"]["containers"][0]["env"]}
    found = []
    for job in range(3):
        for index in range(2):
            told = {**env, "MEGASCALE_SLICE_ID": str(job), "JOB_COMPLETION_INDEX": str(index)}
            labels = template["metadata"]["labels"] | {names.JOB_INDEX: str(job), names.COMPLETION_INDEX: str(index)}
            topology = Topology.from_env(told)
            assert topology.node_rank == names.node_of({"metadata": {"labels": labels}})
            found.append((topology.node_rank, topology.nodes, topology.master))
    assert found == [(rank, 6, f"train-{JOB_ID}-node-0-0.train-{JOB_ID}") for rank in range(6)]


def test_a_dry_run_and_the_record_know_the_nodes(project: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--target", "kubernetes", "--image", "i", "--gpus", "4", "--accelerator", "tpu-v5p-slice"]
    for option in ("workload=jobset", "gpu=tpu", "tpu_topology=2x2x2", "slices=2"):
        words += ["--option", option]
    assert main([*words, "--dry-run", "--json", "--no-python", "true"]) == exit_status.OK
    assert '"nodes": 4' in capsys.readouterr().out
    assert main([*words, "--sweep", "lr=1,2", "--dry-run", "--json", "--no-python", "true"]) == exit_status.OK
    assert capsys.readouterr().out.count('"nodes": 4') == 2
    assert main([*words, "--nodes", "3", "--dry-run", "--no-python", "true"]) == exit_status.USAGE
    assert capsys.readouterr().err == (
        "accel submit: target kubernetes: --nodes 3: 2 slices of 2x2x2 have 4 hosts of 4 chips; leave it out\n"
    )


@pytest.fixture
def hosts_of_slices(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """Its nodes have room for two hosts of a slice each, and GKE's labels."""
    labels = {TPU_LABEL: "tpu-v5p-slice", TPU_TOPOLOGY: "2x2x2"}
    for name in kubernetes.nodes:
        body = {"metadata": {"labels": labels}}
        kubernetes.client.call("PATCH", f"/api/v1/nodes/{name}", body, content_type=MERGE)
        kubernetes.report(name, {TPU_RESOURCE: "8"})
    yield kubernetes
    for name in kubernetes.nodes:
        without = {"metadata": {"labels": dict.fromkeys(labels)}}
        kubernetes.client.call("PATCH", f"/api/v1/nodes/{name}", without, content_type=MERGE)


def test_two_slices_are_one_world(hosts_of_slices: Kubernetes, namespace: str, home: Path, project: Path) -> None:
    text = 'echo "rank $RANK of $WORLD_SIZE in slice $MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES"'
    given = {"image": IMAGE, "code": "image", "workload": "jobset", "gpu": "tpu", "tpu_topology": "2x2x2", "slices": 2}
    spec = JobSpec(
        argv=("sh", "-c", text), entry="command", procs_per_node=1, grace_s=2.0, resources=V5P, code=str(project),
        options=given,
    )  # fmt: skip
    job = submit_spec(spec, "kubernetes", start=project)
    status = job.wait(300)
    assert status.state is State.SUCCEEDED, (status, printed(job))
    lines = sorted(line.text.strip() for line in job.logs() if line.text.startswith("rank "))
    assert lines == [f"rank {rank} of 4 in slice {rank // 2} of 2" for rank in range(4)]
    assert [line.rank for line in job.logs(ranks=[3]) if line.text.startswith("rank ")] == [3]
    assert job.record.nodes == 4


def test_options_of_another_target_stay_as_they_are() -> None:
    assert tpu_slices.with_slice_nodes(JobSpec(argv=("a.py",), resources=V5P), options(gpu="tpu")).nodes == 1
