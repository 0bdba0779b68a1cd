"""Jobs go on while a part of the cluster is away, and nothing of what they wrote is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers import Job, State
from tests.clusters.kubernetes import Kubernetes
from tests.waiting import until

from .conftest import Submit, printed

# Ends when its node says so: a file that the test makes.
_COUNTS = """\
n=0
until [ -e /told/end ]; do n=$((n + 1)); echo "$RANK $n"; echo $n >/told/n; sleep 0.2; done
echo "end $n"
"""
_PATIENT = [
    {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "seconds": 300}
    for what in ("unreachable", "not-ready")
]


@pytest.fixture
def told(tmp_path: Path, kubernetes: Kubernetes) -> Path:
    made = tmp_path / "told"
    kubernetes.share(made)
    return made


@pytest.fixture
def job(submit: Submit, told: Path) -> Iterator[Job]:
    """It runs on one node, and tolerates that its node is away for a while, as by default it does."""
    volumes = [{"mount": "/told", "host_path": str(told)}]
    options = {"workload": "job", "pod_security": "privileged", "volumes": volumes, "tolerations": _PATIENT}
    job = submit(_COUNTS, options=options)
    until(lambda: "0 1\n" in printed(job), "it runs")
    yield job
    job.cancel(wait=False)


def _node(kubernetes: Kubernetes, namespace: str) -> str:
    (pod,) = kubernetes.pods(namespace)
    return str(pod["spec"]["nodeName"])


def _count(job: Job) -> int:
    return printed(job).count("\n")


def _ends_well(job: Job, told: Path) -> None:
    before = _count(job)
    until(lambda: _count(job) > before, "it goes on")
    (told / "end").touch()
    assert job.wait(120).state is State.SUCCEEDED
    _whole(job)


def _whole(job: Job) -> None:
    """Every line is there, in its order."""
    lines = printed(job).splitlines()
    count = int(lines[-1].removeprefix("end "))
    assert lines[:-1] == [f"0 {n}" for n in range(1, count + 1)]
    assert [line.text for line in job.logs() if line.stream == "missing"] == []


@pytest.mark.alone
def test_a_kubelet_that_stops_and_comes_back(job: Job, told: Path, kubernetes: Kubernetes, namespace: str) -> None:
    name = _node(kubernetes, namespace)
    kubernetes.nodes[name].signal("kubelet", signal.SIGSTOP)
    try:
        kubernetes.miss_node(name)
        until(lambda: "its node does not answer" in job.status().message, "it is said")
        assert job.status().state is State.RUNNING
    finally:
        kubernetes.nodes[name].signal("kubelet", signal.SIGCONT)
    until(lambda: job.status().message == "", "it is back")
    _ends_well(job, told)


@pytest.mark.alone
def test_a_node_that_is_cut_off(job: Job, told: Path, kubernetes: Kubernetes, namespace: str) -> None:
    name = _node(kubernetes, namespace)
    kubernetes.nodes[name].machine.link(False)
    try:
        kubernetes.miss_node(name)
        until(lambda: "its node does not answer" in job.status().message, "it is said")
    finally:
        kubernetes.nodes[name].machine.link(True)
    until(lambda: job.status().message == "", "it is back")
    _ends_well(job, told)


@pytest.mark.alone
def test_a_container_runtime_that_is_killed(job: Job, told: Path, kubernetes: Kubernetes, namespace: str) -> None:
    node = kubernetes.nodes[_node(kubernetes, namespace)]
    node.signal("containerd", signal.SIGKILL)
    try:
        assert job.status().state is State.RUNNING
    finally:
        node.start_containerd()
    _ends_well(job, told)


@pytest.mark.alone
def test_an_api_server_that_freezes(job: Job, told: Path, kubernetes: Kubernetes) -> None:
    follower = job.logs(follow=True)
    next(follower)
    kubernetes.freeze("kube-apiserver")
    try:
        far = int((told / "n").read_text()) + 20
        until(lambda: int((told / "n").read_text() or 0) > far, "it goes on")
    finally:
        kubernetes.freeze("kube-apiserver", False)
    (told / "end").touch()
    assert "end " in list(follower)[-1].text
    assert job.wait(60).state is State.SUCCEEDED
    _whole(job)


@pytest.mark.alone
def test_a_name_server_that_is_frozen_while_nodes_look_for_each_other(
    submit: Submit, kubernetes: Kubernetes, namespace: str
) -> None:
    kubernetes.freeze("coredns")
    try:
        job = submit("echo there", nodes=2, options={"workload": "job"})
        until(lambda: len([pod for pod in kubernetes.pods(namespace) if pod["status"]["phase"] == "Running"]) == 2, "")
    finally:
        kubernetes.freeze("coredns", False)
    assert job.wait(180).state is State.SUCCEEDED
    assert printed(job) == "there\n" * 2
