"""A Kubernetes cluster for the tests that need one: started once, ended at the end, a namespace of its own a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job
from tests.clusters.kubernetes import Kubernetes, claim, lacks
from tests.needs import missing
from tests.waiting import until as until

NODES = 2
Submit = Callable[..., Job]


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Kubernetes]:
    absent = lacks()
    if absent:
        missing(*absent)
    with claim() as cluster:
        cluster.start(NODES)
        yield cluster


@pytest.fixture
def kubernetes(_cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubernetes]:
    """n1 and n2, 8 seeming GPUs each, and an API server that is up; this process is its administrator."""
    monkeypatch.setenv("KUBECONFIG", str(_cluster.kubeconfig()))
    _cluster.start_api()
    try:
        yield _cluster
    finally:
        _cluster.start_api()


@pytest.fixture
def namespace(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new one, that of this process' context."""
    made = kubernetes.namespace()
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(namespace=made)))
    try:
        yield made
    finally:
        kubernetes.start_api()
        kubernetes.remove_namespace(made)


@pytest.fixture
def project(project: Path) -> Path:
    (project / "note.txt").write_text("code\n")
    return project


@pytest.fixture
def submit(namespace: str, home: Path, project: Path) -> Submit:
    """Submits the text of a shell script, which needs no code, to the namespace of the test."""

    def submit(text: str, args: tuple[str, ...] = (), **given: Any) -> Job:
        options = {"cpu": True, "image": "example.org/train:1", "code": "image", **given.pop("options", {})}
        words = ["-c", text, "sh", *args]
        settings = {"procs_per_node": 1, "grace_s": 2.0, "target": "kubernetes", **given}
        return schedulers.submit("sh", words, entry="command", cwd=project, options=options, **settings)

    return submit


def printed(job: Job) -> str:
    """By the program; a pod of one rank has its launcher's lines among them."""
    lines = [line.text for line in job.logs() if line.rank is not None]
    return "".join(line for line in lines if not line.startswith("accel launch: "))


def made_by(job: Job, cluster: Kubernetes, namespace: str) -> list[str]:
    """What there is of the job in the cluster, but for its events."""
    return [each for each in cluster.objects(namespace) if job.id in each]
