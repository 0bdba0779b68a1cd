"""`accel submit --dry-run=server`: what a real API server says of a job's objects, none of which it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.cli import exits, main
from schedulers.kubernetes.reviewing import dropped
from tests.clusters.kubernetes import Kubernetes

WORKLOADS = ("pytorchjob", "jobset", "job", "trainjob")


def review(project: Path, *options: str) -> int:
    given = [word for option in ("cpu=true", *options) for word in ("--option", option)]
    words = ["submit", "--target", "kubernetes", "--image", "example.org/train:1", "--cpus", "1", "--memory", "1G"]
    return main([*words, *given, "--dry-run=server", "--no-python", "true"])


@pytest.fixture(autouse=True)
def _in_the_project(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(home / "none"))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_is_made_of_a_job_that_would_be_taken(
    workload: str, project: Path, home: Path, kubernetes: Kubernetes, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert review(project, f"workload={workload}") == exits.OK
    shown = capsys.readouterr()
    assert shown.err == "accel: kubernetes would take it\n"
    assert f"$ create {workload}/true-dry-run-" in shown.out
    assert kubernetes.objects(namespace) == []
    assert list(home.glob("**/*.tar")) == list(home.glob("jobs/*")) == []


def test_a_field_that_the_cluster_does_not_know_is_a_line(
    project: Path, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """This server is older than strict validation, so it is seen in what it answers."""
    assert review(project, "affinity={nodeAfinity: {some: thing}}") == exits.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: PyTorchJob true-dry-run-")
    place = "spec.pytorchReplicaSpecs.Master.template.spec.affinity.nodeAfinity"
    assert line.endswith(f": {place}: the cluster does not know it, and would leave it out")


def test_each_refusal_is_a_line(project: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert review(project, "affinity={nodeAffinity: near}") == exits.ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel: target kubernetes: the API server does not take PyTorchJob")
    assert "spec.affinity.nodeAffinity" in line

    assert review(project, "namespace=nowhere") == exits.ERROR
    assert capsys.readouterr().err == (
        "accel: target kubernetes: there is no namespace nowhere (namespace: in accel.yaml)\n"
    )


def test_what_one_may_not_do_is_a_line(
    project: Path, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    account = kubernetes.kubeconfig(service_account="default", namespace=namespace)
    monkeypatch.setenv("KUBECONFIG", str(account))
    assert review(project) == exits.ERROR
    may_not = f"accel: target kubernetes: service account {namespace}/default may not create"
    assert capsys.readouterr().err.splitlines() == [
        f"{may_not} {what} in namespace {namespace}: no Role of it allows that"
        for what in ("pytorchjobs.kubeflow.org", "configmaps")
    ]


def test_the_answer_in_json(project: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--target", "kubernetes", "--image", "i", "--dry-run=server", "--json", "--no-python", "true"]
    assert main(words) == exits.OK
    shown = json.loads(capsys.readouterr().out)
    assert (shown["refused"], shown["kind"]) == ([], "kubernetes")


def test_a_plain_dry_run_asks_nobody(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    words = ["submit", "--target", "kubernetes", "--image", "i"]
    for word in ("--dry-run", "--dry-run=client"):
        assert main([*words, word, "--no-python", "true"]) == exits.OK
    assert main([*words, "--dry-run=server", "--no-python", "true"]) == exits.ERROR
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
    assert dropped(sent, there) == lost
