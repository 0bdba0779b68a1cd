"""What becomes of jobs on a cluster is said in the words that people need."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from schedulers import Job, Reason, State, Status
from schedulers.kubernetes.native_id import Native
from schedulers.kubernetes.status.job_states import status_of
from tests.clusters.kube.client import MERGE, Refused
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.waiting import until

from ..conftest import Submit, made_by, printed

_RUNS = "echo hello; sleep 600"
_NO_UPDATES = """\
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: accel-test-{namespace}}}
spec:
  matchConstraints:
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {namespace}}}}}
    resourceRules:
    - {{apiGroups: [kubeflow.org], apiVersions: [v1], operations: [UPDATE], resources: [pytorchjobs]}}
  validations: [{{expression: "false", message: no update of this one}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: accel-test-{namespace}}}
spec: {{policyName: accel-test-{namespace}, validationActions: [Deny]}}
"""


def _pod(kubernetes: Kubernetes, namespace: str) -> str:
    (pod,) = kubernetes.pods(namespace)
    return str(pod["metadata"]["name"])


def _refuses_updates(kubernetes: Kubernetes, path: str) -> bool:
    body = {"metadata": {"annotations": {"example.org/a": "b"}}}
    try:
        kubernetes.client.call("PATCH", path, body, content_type=MERGE, query={"dryRun": "All"})
    except Refused:
        return True
    return False


def _running(job: Job) -> None:
    until(lambda: any(line.text == "hello\n" for line in job.logs()), "it runs")
    until(lambda: job.status().state is State.RUNNING, "it is said to run")


def _polled_to_its_end(job: Job) -> Status:
    """Without reading its logs, as `wait` does."""
    until(lambda: job.status().state.final, "it has ended")
    return job.status()


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


def test_a_container_that_took_too_much_memory(submit: Submit) -> None:
    job = submit("exec tail /dev/zero", cpus=1, memory_gb=0.25)
    status = job.wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.OUT_OF_MEMORY, 137)
    assert "accel launch" not in status.message


def test_what_a_pod_writes_as_it_is_evicted(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    """The operator fails the job at once; its pod ends, and writes, for two seconds more."""
    job = submit("trap 'sleep 2; echo bye; exit 143' TERM; echo hello; sleep 600 & wait", grace_s=10.0)
    _running(job)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(line.text for line in job.logs(follow=True)), daemon=True)
    follower.start()
    until(lambda: lines, "it is followed")
    pod = _pod(kubernetes, namespace)
    kubernetes.displace(namespace, pod)
    follower.join(60)
    assert "bye\n" in lines
    assert (job.status().state, job.status().reason) == (State.FAILED, Reason.PREEMPTED)


_FAILS_IN_WORKER_1 = {
    "name": "fails",
    "image": IMAGE,
    "command": ["sh", "-c", 'case "$(hostname)" in *worker-1) exit 3; esac'],
}


def test_no_pod_waits_for_one_that_failed_before_its_launcher(
    kubernetes: Kubernetes, namespace: str, submit: Submit
) -> None:
    """Nobody asks for the job meanwhile: the cluster ends the other pod."""
    submit("true", nodes=2, options={"pod_patch": {"spec": {"initContainers": [_FAILS_IN_WORKER_1]}}})

    def left() -> list[tuple[str, str]]:
        pods = kubernetes.pods(namespace)
        return [(str(pod["metadata"]["name"])[-8:], str(pod["status"].get("phase"))) for pod in pods]

    until(lambda: left() == [("worker-1", "Failed")], "only the pod that failed is left")


def test_what_runs_on_after_the_end_is_cancelled(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    """Where the user's patch lets pods run on."""
    patch = {"spec": {"runPolicy": {"cleanPodPolicy": "None"}}}
    options = {"patch": patch, "pod_patch": {"spec": {"initContainers": [_FAILS_IN_WORKER_1]}}}
    job = submit("true", nodes=2, options=options)
    until(lambda: any("accel launch: " in line.text for line in job.logs()), "node 0 waits")
    _becomes(job, Reason.SETUP, "container fails failed")
    assert job.cancel_rest()
    until(lambda: not kubernetes.pods(namespace), "its pods are gone")
    assert not job.cancel_rest()
    assert any("accel launch: " in line.text for line in job.logs())


def test_all_nodes_logs_stay_when_one_fails(submit: Submit) -> None:
    """Nobody follows. The cluster deletes pods that run when it learns that one has failed."""
    jobs = [
        submit("echo here is rank $RANK; [ $RANK = 0 ] || exit 7; sleep 600", nodes=2, options={"workload": workload})
        for workload in ("pytorchjob", "job")
    ]
    for job in jobs:
        status = _polled_to_its_end(job)
        assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7), status
        assert "rank 1 on node 1" in status.message
        text = "".join(line.text for line in job.logs())
        assert "accel launch: 2 nodes, node 0 " in text
        assert "accel launch: started on " in text
        assert "here is rank 1\n" in text


def test_cancel_frees_an_object_that_hangs(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    """As after a deletion in the foreground, whose last step a webhook has refused."""
    job = submit(_RUNS)
    _running(job)
    native = Native.parse(job.native_id or "")
    path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{native.name}"
    kubernetes.apply(_NO_UPDATES.format(namespace=namespace))
    try:
        until(lambda: _refuses_updates(kubernetes, path), "updates are refused")
        kubernetes.client.call("DELETE", path, {"propagationPolicy": "Foreground"})
        until(lambda: not kubernetes.pods(namespace), "its pods are gone")
        assert kubernetes.client.call("GET", path)["metadata"]["finalizers"] == ["foregroundDeletion"]
        assert job.cancel().state is State.CANCELLED
        assert not made_by(job, kubernetes, namespace)
    finally:
        policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
        kubernetes.client.call("DELETE", f"{policies}ybindings/accel-test-{namespace}")
        kubernetes.client.call("DELETE", f"{policies}ies/accel-test-{namespace}")


def test_no_attempt_follows_the_only_one(submit: Submit) -> None:
    """Of a Job, whose conditions change some times between a pod's end and its own."""
    job = submit("exit 7", options={"workload": "job"})
    seen = set()
    while not (status := job.status()).state.final:
        seen.add((status.attempt, status.message))
    assert (status.state, status.exit_code, status.attempt) == (State.FAILED, 7, 0)
    assert {attempt for attempt, _ in seen} == {0}
    assert not [message for _, message in seen if "again" in message]


def test_an_exit_code_is_the_program_s(submit: Submit) -> None:
    job = submit("echo oh no; exit 7")
    status = job.wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7)


def test_what_a_program_prints_does_not_decide_its_state(submit: Submit) -> None:
    """With a launcher that stays, and with one that the program replaces."""
    text = "echo 'accel launch: the time limit of 60 s is over'; [ $RANK = 1 ] && sleep 600; echo oh no; exit 7"
    for processes, message in ((2, "rank 0 on node 0: exited with code 7"), (1, "node 0: oh no")):
        status = submit(text, procs_per_node=processes, options={"workload": "job"}).wait(90)
        assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7), status
        assert status.message == message


@pytest.mark.alone
def test_a_node_that_is_lost(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    """Of a job that may be started again: of another, the operator makes a new pod or ends it, as it happens to see the
    pod while it is being deleted or not."""
    job = submit(_RUNS, max_restarts=1)
    _running(job)
    waiting = _waited(job)
    (pod,) = kubernetes.pods(namespace)
    node = pod["spec"]["nodeName"]
    kubernetes.lose_node(node)
    try:
        _becomes(job, Reason.NODE_FAILURE, "node 0: its node was lost")
    finally:
        kubernetes.find_node(node)
    until(lambda: job.status().reason is Reason.NONE and job.status().state is State.RUNNING, "it runs again")
    job.cancel()
    waiting.join(60)
    assert not waiting.is_alive()


_CANNOT_BE_TOLD = "its pods are gone: its time limit may have ended it"


def test_a_time_limit_is_not_tried_again(kubernetes: Kubernetes, namespace: str, submit: Submit) -> None:
    """Of each kind; a PyTorchJob's restarts have a limit of their own, after which the operator calls it a success.
    Nobody follows the last job: the logs of pods that the cluster keeps stay, and a missing one is reported."""
    jobs = [
        submit(_RUNS, time_limit_s=2.0, max_restarts=3, options={"workload": workload})
        for workload in ("pytorchjob", "jobset", "job", "trainjob")
    ]
    # Its limit counts from the start of each pod. Once node 0 reaches it, the cluster deletes a pod that starts late.
    alone = submit(_RUNS, nodes=2, time_limit_s=20.0, options={"workload": "job"})
    for job in jobs:
        status = job.wait(120)
        assert (status.state, status.reason, status.attempt) == (State.FAILED, Reason.TIME_LIMIT, 0), (job, status)
    (pod,) = [each for each in kubernetes.pods(namespace) if jobs[0].id in each["metadata"]["name"]]
    kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}")
    native = Native.parse(jobs[0].native_id or "")
    at = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{native.name}"
    made = kubernetes.client.call("GET", at)
    assert (status_of(made).state, status_of(made).reason) == (State.FAILED, Reason.TIME_LIMIT), made
    del made["metadata"]["annotations"]["accel.dev/end"]
    without = status_of(made)
    assert (without.state, without.reason) == (State.FAILED, Reason.TIME_LIMIT), made
    assert without.message == _CANNOT_BE_TOLD
    until(lambda: alone.status().state.final, "the last one is over")
    assert alone.status().reason is Reason.TIME_LIMIT
    lines = list(alone.logs())
    nodes = {line.source.partition(".")[0] for line in lines if line.text.startswith("accel launch: ")}
    missing = [line for line in lines if line.stream == "missing"]
    assert nodes == {"node-0", "node-1"} or (nodes == {"node-0"} and missing), lines


_KILLS_ITS_LAUNCHER = """\
[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
[ $RANK = 1 ] && kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)
sleep 600
"""


_SLOW_TO_END = """\
[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0
[ $RANK = 0 ] || kill -9 $$
trap 'sleep 8; exit 1' TERM
while true; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("text", "grace_s"), [*long((_KILLS_ITS_LAUNCHER, 2.0)), (_SLOW_TO_END, 20.0)], ids=["launcher", "rank"]
)
def test_one_failure_costs_one_restart(text: str, grace_s: float, submit: Submit) -> None:
    """The launcher that comes back ends what is left of the attempt before, or waits for its end."""
    jobs = [
        submit(text, nodes=2, max_restarts=1, grace_s=grace_s, options={"workload": workload})
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
    assert status.message == "its PyTorchJob is gone: it was cancelled from another machine, or somebody deleted it"
    waiting.join(60)
