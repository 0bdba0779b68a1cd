"""What becomes of jobs on a cluster is said in the words that people need."""

from __future__ import annotations

import threading
from pathlib import Path

from schedulers import Job, Reason, State
from schedulers.kubernetes.native import Native
from tests.clusters.kubernetes import Kubernetes
from tests.waiting import until

from .conftest import Submit, printed

_RUNS = "echo hello; sleep 600"


def _pod(kubernetes: Kubernetes, namespace: str) -> str:
    (pod,) = kubernetes.pods(namespace)
    return str(pod["metadata"]["name"])


def _running(job: Job) -> None:
    until(lambda: any(line.text == "hello\n" for line in job.logs()), "it runs")
    until(lambda: job.status().state is State.RUNNING, "it is said to run")


def _waited(job: Job) -> threading.Thread:
    """Somebody who waits for it meanwhile, as `accel wait` does."""
    thread = threading.Thread(target=job.wait, daemon=True)
    thread.start()
    return thread


def _becomes(job: Job, reason: Reason, *words: str) -> None:
    def is_said() -> bool:
        status = job.status()
        return status.reason is reason and all(word in status.message for word in words)

    until(is_said, f"{reason} with {words}")


def _becomes_unready(kubernetes: Kubernetes, namespace: str, pod: str) -> None:
    """As the node controller does where a kubelet falls silent; here, its node was said to be lost before."""
    path = f"/api/v1/namespaces/{namespace}"
    conditions = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    kind = "application/strategic-merge-patch+json"
    kubernetes.client.call("PATCH", f"{path}/pods/{pod}/status", conditions, content_type=kind)
    event = {
        "metadata": {"generateName": "event-", "namespace": namespace}, "type": "Warning", "reason": "NodeNotReady",
        "involvedObject": {"kind": "Pod", "name": pod, "namespace": namespace}, "message": "Node is not ready",
    }  # fmt: skip
    kubernetes.client.call("POST", f"{path}/events", event)


def test_an_image_that_cannot_be_pulled(submit: Submit) -> None:
    job = submit("true", options={"image": "example.org/no-such:1"})
    _becomes(job, Reason.SETUP, "node 0: the image cannot be pulled", "example.org/no-such:1")
    waiting = _waited(job)
    _becomes(job, Reason.SETUP, "node 0: the image cannot be pulled")  # and as it is watched
    assert job.cancel().state is State.CANCELLED
    waiting.join(60)
    assert not waiting.is_alive()


def test_no_node_fits_and_why(submit: Submit) -> None:
    job = submit("true", gpus=99, options={"cpu": False})
    _becomes(job, Reason.NO_CAPACITY, "no node fits", "nvidia.com/gpu")
    assert job.status().state is State.QUEUED
    job.cancel()


def test_a_quota_that_is_spent_is_said_as_it_is_asked_for_and_as_it_is_watched(
    kubernetes: Kubernetes, namespace: str, submit: Submit
) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    kubernetes.apply(quota, namespace)
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/none"
    until(lambda: "hard" in kubernetes.client.call("GET", path).get("status", {}), "it holds")
    job = submit("true")
    _becomes(job, Reason.NO_CAPACITY, "quota does not allow its pods")
    waiting = _waited(job)
    _becomes(job, Reason.NO_CAPACITY, "quota does not allow its pods")
    job.cancel()
    waiting.join(60)


def test_an_evicted_pod(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    job = submit(_RUNS)
    _running(job)
    waiting = _waited(job)
    kubernetes.evict(namespace, _pod(kubernetes, namespace))
    until(lambda: job.status().state.final, "it has failed")
    status = job.status()
    assert (status.state, status.reason) == (State.FAILED, Reason.PREEMPTED)
    assert "its pod was evicted" in status.message
    waiting.join(60)


def test_a_container_that_took_too_much_memory(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    job = submit(_RUNS)
    _running(job)
    waiting = _waited(job)
    kubernetes.oom_kill(namespace, _pod(kubernetes, namespace))
    until(lambda: job.status().state.final, "it has failed")
    status = job.status()
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.OUT_OF_MEMORY, 137)
    waiting.join(60)


def test_an_exit_code_is_the_program_s(submit: Submit) -> None:
    job = submit("echo oh no; exit 7")
    status = job.wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7)


def test_a_node_that_is_lost(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    job = submit(_RUNS)
    _running(job)
    waiting = _waited(job)
    (pod,) = kubernetes.pods(namespace)
    node = pod["spec"]["nodeName"]
    kubernetes.lose_node(node)
    try:
        _becomes_unready(kubernetes, namespace, pod["metadata"]["name"])
        _becomes(job, Reason.NODE_FAILURE, "node 0: its node does not answer")
    finally:
        kubernetes.find_node(node)
    # The operator makes another pod in place of the one that its node has given up.
    until(lambda: job.status().reason is Reason.NONE and job.status().state is State.RUNNING, "it runs again")
    job.cancel()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_time_limit_is_not_tried_again(submit: Submit) -> None:
    """Of each kind; a PyTorchJob's restarts have a limit of their own."""
    jobs = [
        submit(_RUNS, time_limit_s=2.0, max_restarts=3, options={"workload": workload})
        for workload in ("pytorchjob", "jobset", "job", "trainjob")
    ]
    for job in jobs:
        status = job.wait(120)
        assert (status.state, status.reason, status.attempt) == (State.FAILED, Reason.TIME_LIMIT, 0), (job, status)


_KILLS_ITS_LAUNCHER = """\
[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
[ $RANK = 1 ] && kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)
sleep 600
"""


def test_a_launcher_that_was_killed_costs_one_restart(submit: Submit) -> None:
    """By its own rank, here. The launcher that comes back ends what is left of the attempt before."""
    jobs = [
        submit(_KILLS_ITS_LAUNCHER, nodes=2, max_restarts=1, options={"workload": workload})
        for workload in ("pytorchjob", "job")
    ]
    for job in jobs:
        status = job.wait(180)
        assert (status.state, status.attempt) == (State.SUCCEEDED, 1), (job, status, printed(job))


def test_a_program_that_is_not_there_is_not_tried_again(submit: Submit) -> None:
    jobs = [
        submit("exit 127", max_restarts=3, options={"workload": workload}) for workload in ("jobset", "job", "trainjob")
    ]
    for job in jobs:
        status = job.wait(120)
        found = status.state, status.reason, status.exit_code, status.attempt
        assert found == (State.FAILED, Reason.SETUP, 127, 0), (job, status)


def test_deletion_by_somebody_else(kubernetes: Kubernetes, namespace: str, submit: Submit, project: Path) -> None:
    job = submit(_RUNS)
    _running(job)
    waiting = _waited(job)
    native = Native.parse(job.native_id or "")
    kubernetes.client.call("DELETE", f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{native.name}")
    until(lambda: job.record.reload().status.state.final, "who waits is told")
    status = job.record.status
    assert (status.state, status.reason, status.native_state) == (State.FAILED, Reason.LOST, "Deleted")
    assert status.message == "its PyTorchJob is gone: it was deleted, and not through accel"
    waiting.join(60)
