"""`accel submit --dry-run=server`: what a real API server says of a job's objects, none of which it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exit_status, main
from schedulers.kubernetes.dry_run import dropped_fields
from tests.clusters.kubernetes import Kubernetes
from tests.marks import long
from tests.waiting import until

from .conftest import CLAIM, Submit, judging, with_quota

WORKLOADS = ("pytorchjob", "jobset", "job", "trainjob")


def review(project: Path, *options: str) -> int:
    given = [word for option in ("cpu=true", *options) for word in ("--option", option)]
    words = ["submit", "--target", "kubernetes", "--image", "example.org/train:1", "--cpus", "1", "--memory", "1G"]
    return main([*words, *given, "--dry-run=server", "--no-python", "true"])


@pytest.fixture(autouse=True)
def _in_the_project(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(home / "none"))


@pytest.mark.parametrize("workload", [WORKLOADS[0], *long(*WORKLOADS[1:])])
def test_nothing_is_made_of_a_job_that_would_be_taken(
    workload: str, project: Path, home: Path, kubernetes: Kubernetes, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert review(project, f"workload={workload}") == exit_status.OK
    shown = capsys.readouterr()
    assert shown.err == "accel: kubernetes would accept the job\n"
    assert f"$ create {workload}/true-dry-run-" in shown.out
    assert kubernetes.objects(namespace) == []
    assert list(home.glob("**/*.tar")) == list(home.glob("jobs/*")) == []


def test_slices_of_tpus(project: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--target", "kubernetes", "--image", "i", "--gpus", "4", "--accelerator", "tpu-v5p-slice"]
    for option in ("workload=jobset", "gpu=tpu", "tpu_topology=2x2x2", "slices=2"):
        words += ["--option", option]
    size = ["--cpus", "1", "--memory", "1G"]
    assert main([*words, *size, "--dry-run=server", "--no-python", "true"]) == exit_status.OK
    shown = capsys.readouterr()
    assert shown.err == "accel: kubernetes would accept the job\n"
    assert "exclusive-topology: cloud.google.com/gke-nodepool" in shown.out


def test_a_field_that_the_cluster_does_not_know_is_a_line(
    project: Path, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes has it, and its operator is older."""
    assert review(project, "pod_patch={spec: {hostnameOverride: a}}") == exit_status.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: the API server rejects it: ")
    assert "spec.pytorchReplicaSpecs.Master.template.spec.hostnameOverride" in line


def test_each_refusal_is_a_line(project: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert review(project, "patch={spec: {runPolicy: {backoffLimit: many}}}") == exit_status.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: the API server rejects PyTorchJob")
    assert "spec.runPolicy.backoffLimit" in line

    assert review(project, "namespace=nowhere") == exit_status.ERROR
    assert capsys.readouterr().err == (
        "accel: target kubernetes: namespace nowhere not found (namespace: in accel.yaml)\n"
    )


def test_pods_that_the_namespace_refuses_are_a_line(
    project: Path, kubernetes: Kubernetes, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API server accepts the Job itself, with a warning."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"metadata": {"labels": labels}}
    path = f"/api/v1/namespaces/{namespace}"
    kubernetes.client.call("PATCH", path, body, content_type="application/merge-patch+json")
    words = ["submit", "--target", "kubernetes", "--image", "example.org/train:1", "--cpus", "1", "--memory", "1G"]
    for option in ("cpu=true", "workload=job", "pod_security=privileged", "suspend=true"):
        words += ["--option", option]
    assert main([*words, "--dry-run=server", "--no-python", "true"]) == exit_status.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: Job true-dry-run-")
    assert ": the API server warns: would violate PodSecurity" in line
    assert main([*words, "--no-python", "true"]) == exit_status.OK
    assert ": the API server warns: would violate PodSecurity" in capsys.readouterr().err


def test_the_pod_that_brings_the_code_to_a_claim_is_shown_too(
    project: Path, kubernetes: Kubernetes, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("code=pvc", "code_claim=snapshots")
    assert review(project, *given) == exit_status.ERROR
    none = f"accel: target kubernetes: code_claim: no claim snapshots in namespace {namespace}\n"
    assert capsys.readouterr().err == none
    kubernetes.apply(CLAIM, namespace)
    with_quota(kubernetes, namespace, {"pods": "0"})
    assert review(project, *given) == exit_status.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: the namespace's quota does not allow it: pods ")
    assert '-loader" is forbidden: exceeded quota: small' in line


def test_a_trainjob_whose_runtime_trainer_does_not_see_yet(
    project: Path, home: Path, kubernetes: Kubernetes, namespace: str, submit: Submit, tmp_path: Path
) -> None:
    """Its webhook looks for the runtime: a dry run makes none, and its cache is behind what a submit has just made."""
    asked: list[str] = []
    runtimes = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainingruntimes"

    def verdict(made: dict[str, Any]) -> str | None:
        asked.append(made["metadata"]["name"])
        there = kubernetes.client.call("GET", runtimes)["items"]
        if asked.count(asked[-1]) > 1 and asked[-1] in [each["metadata"]["name"] for each in there]:
            return None
        absent = f'trainingruntimes.trainer.kubeflow.org "{asked[-1]}" not found: specified trainingRuntime'
        return f"spec.runtimeRef: Invalid value: {{}}: {absent} must be created before the TrainJob is created"

    def reviewed() -> bool:
        assert review(project, "workload=trainjob") == exit_status.OK
        return bool(asked)

    with judging(kubernetes, namespace, "trainjobs", tmp_path / "pki", verdict):
        until(reviewed, "the webhook is asked")
        job = submit("true", options={"workload": "trainjob", "suspend": True})
        assert asked.count(f"sh-{job.id}") == 2
    assert f"trainjobs/sh-{job.id}" in kubernetes.objects(namespace)


def test_what_one_may_not_do_is_a_line(
    project: Path, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    account = kubernetes.kubeconfig(service_account="default", namespace=namespace)
    monkeypatch.setenv("KUBECONFIG", str(account))
    assert review(project) == exit_status.ERROR
    may_not = f"accel: target kubernetes: service account {namespace}/default may not create"
    assert capsys.readouterr().err.splitlines() == [
        f"{may_not} {what} in namespace {namespace}: no Role grants this"
        for what in ("pytorchjobs.kubeflow.org", "configmaps")
    ]


def test_the_answer_in_json(project: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--target", "kubernetes", "--image", "i", "--dry-run=server", "--json", "--no-python", "true"]
    assert main(words) == exit_status.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["refused"], shown["kind"]) == ([], "kubernetes")


def test_a_plain_dry_run_asks_nobody(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    words = ["submit", "--target", "kubernetes", "--image", "i"]
    for word in ("--dry-run", "--dry-run=client"):
        assert main([*words, word, "--no-python", "true"]) == exit_status.OK
    assert main([*words, "--dry-run=server", "--no-python", "true"]) == exit_status.USAGE
    assert "/nonexistent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "there", "lost"),
    [
        ({"a": 1}, {"a": 2, "b": 3}, []),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, ["a.c"]),
        ({"a": {}, "b": [], "c": "", "d": None, "e": False, "f": 0}, {}, []),
        ({"a": [{"name": "x", "y": 1}]}, {"a": [{"name": "injected"}, {"name": "x"}]}, ["a[0].y"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a[1]"]),
        ({"a": [{"key": "k", "z": True}]}, {"a": [{"key": "k"}, {"key": "added"}]}, ["a[0].z"]),
    ],
)
def test_what_counts_as_left_out(sent: dict[str, object], there: dict[str, object], lost: list[str]) -> None:
    assert list(dropped_fields(sent, there)) == lost
