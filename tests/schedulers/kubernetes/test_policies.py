"""What a cluster's policies do to jobs: preemption, drains, limits, Pod Security."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from schedulers import Job, Reason, State
from tests.clusters.kube.client import MERGE
from tests.clusters.kubernetes import Kubernetes
from tests.marks import long
from tests.waiting import until

from .conftest import Submit, printed

_RUNS = "echo begun; sleep 600"
_SEAT = "accel.test/seat"  # there is one, on n1


@pytest.fixture
def priorities(kubernetes: Kubernetes) -> Iterator[tuple[str, str]]:
    """A low one and a high one; and a thing of which the cluster has one, on n1."""
    path, tag = "/apis/scheduling.k8s.io/v1/priorityclasses", uuid.uuid4().hex[:6]
    names = f"low-{tag}", f"high-{tag}"
    for name, value in zip(names, (1, 1000), strict=True):
        kubernetes.client.call("POST", path, {"metadata": {"name": name}, "value": value})
    kubernetes.report("n1", {_SEAT: "1"})
    yield names
    for name in names:
        kubernetes.client.call("DELETE", f"{path}/{name}")


def _runs(job: Job) -> None:
    until(lambda: "begun\n" in printed(job), "it runs")


def test_a_job_that_makes_room_for_a_more_important_one(submit: Submit, priorities: tuple[str, str]) -> None:
    low, high = ({"workload": "job", "priority_class": name, "resources": {_SEAT: 1}} for name in priorities)
    first = submit(_RUNS, options=low)
    _runs(first)
    second = submit("true", options=high)
    status = first.wait(120)
    assert (status.state, status.reason) == (State.FAILED, Reason.PREEMPTED), status
    assert "its pod was preempted by one of higher priority" in status.message
    assert second.wait(120).state is State.SUCCEEDED


@pytest.mark.alone
def test_a_node_is_drained(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    """As `kubectl drain` does it; the job goes on elsewhere."""
    job = submit(_RUNS, max_restarts=1)
    _runs(job)
    (pod,) = kubernetes.pods(namespace)
    node, name, uid = pod["spec"]["nodeName"], pod["metadata"]["name"], pod["metadata"]["uid"]
    path = f"/api/v1/nodes/{node}"
    kubernetes.client.call("PATCH", path, {"spec": {"unschedulable": True}}, content_type=MERGE)
    try:
        kubernetes.displace(namespace, name)

        def elsewhere() -> bool:
            found = [each for each in kubernetes.pods(namespace) if each["metadata"]["uid"] != uid]
            return any(each["status"]["phase"] == "Running" and each["spec"]["nodeName"] != node for each in found)

        until(lambda: elsewhere() or job.status().state.final, "it runs elsewhere")
        status = job.status()
        assert status.state is State.RUNNING, status
    finally:
        kubernetes.client.call("PATCH", path, {"spec": {"unschedulable": None}}, content_type=MERGE)
    assert job.cancel().state is State.CANCELLED


def test_pods_that_a_limit_range_refuses(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    most = {"type": "Container", "max": {"cpu": "500m"}}
    limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": [most]}}
    kubernetes.apply(limits, namespace)
    job = submit("true", cpus=1)
    until(lambda: "maximum cpu usage per Container is 500m" in job.status().message, "it is said")
    assert job.status().state is State.QUEUED
    assert job.cancel().state is State.CANCELLED


@pytest.mark.parametrize("workload", ["pytorchjob", *long("job", "jobset", "trainjob")])
def test_two_nodes_in_a_restricted_namespace(
    workload: str, submit: Submit, kubernetes: Kubernetes, namespace: str
) -> None:
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    kubernetes.client.call("PATCH", f"/api/v1/namespaces/{namespace}", labels, content_type=MERGE)
    job = submit("echo rank $RANK", nodes=2, procs_per_node=2, options={"workload": workload, "code": "auto"})
    status = job.wait(180)
    assert status.state is State.SUCCEEDED, status
    assert sorted(printed(job).splitlines()) == [f"rank {rank}" for rank in range(4)]


def test_pods_that_the_standard_forbids(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    kubernetes.client.call("PATCH", f"/api/v1/namespaces/{namespace}", labels, content_type=MERGE)
    jobs = [submit("true", options={"workload": kind, "pod_security": "baseline"}) for kind in ("pytorchjob", "job")]
    for job in jobs:
        until(lambda job=job: "violates PodSecurity" in job.status().message, "it is said")  # type: ignore[misc]
        assert job.status().state is State.QUEUED
        assert job.cancel().state is State.CANCELLED
