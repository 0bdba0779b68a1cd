"""What the cluster says of a job becomes a state, a reason people need, the first failure's exit code, and attempts."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers import Reason, State
from schedulers.kubernetes.manifests.pods import TIME_LIMIT
from schedulers.kubernetes.status.job_states import status_of
from tests.schedulers.kubernetes.shapes import (
    condition,
    ended,
    event,
    pod,
    running,
    seconds_ago,
    terminated,
    waiting,
    workload,
)

_KINDS = ("PyTorchJob", "Job", "JobSet", "TrainJob")
_DONE = {"PyTorchJob": "Succeeded", "Job": "Complete", "JobSet": "Completed", "TrainJob": "Complete"}


@pytest.mark.parametrize("kind", _KINDS)
def test_a_job_that_ended_well(kind: str) -> None:
    # `Running` is taken back, not removed: any condition that is True counts, wherever it stands.
    found = status_of(workload(kind, condition(_DONE[kind]), condition("Running", status="False")))
    assert (found.state, found.reason, found.exit_code) == (State.SUCCEEDED, Reason.NONE, 0)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_job_of_which_nothing_is_known_yet(kind: str) -> None:
    made = workload(kind)
    del made["status"]
    found = status_of(made)
    assert (found.state, found.reason, found.message) == (State.QUEUED, Reason.NONE, "")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_job_that_runs(kind: str) -> None:
    found = status_of(workload(kind), [pod(0, running()), pod(1, running())])
    assert (found.state, found.message, found.attempt) == (State.RUNNING, "", 0)


def test_a_pytorchjob_runs_by_its_condition_where_its_pods_are_not_known() -> None:
    assert status_of(workload("PyTorchJob", condition("Created"), condition("Running"))).state is State.RUNNING
    assert status_of(workload("PyTorchJob", condition("Created"))).state is State.QUEUED


_UNSCHEDULABLE = condition(
    "PodScheduled",
    "Unschedulable",
    "0/3 nodes are available: 1 node(s) had untolerated taint {a: b}, 2 Insufficient nvidia.com/gpu.",
    "False",
)
_NO_CLAIM = condition(
    "PodScheduled",
    "Unschedulable",
    '0/2 nodes are available: persistentvolumeclaim "nope" not found. preemption: 0/2 nodes are available',
    "False",
)
_CACHE = 'MountVolume.SetUp failed for volume "accel-code" : failed to sync configmap cache: timed out waiting'
_QUOTA = (
    'pods "run1-0" is forbidden: exceeded quota: team, requested: requests.cpu=8, used: requests.cpu=4, limited: 10'
)
_SECURITY = (
    'pods "run1-0" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false '
    '(container "init-pytorch" must set securityContext.allowPrivilegeEscalation=false)'
)
_WEBHOOK = 'admission webhook "policy.example.org" denied the request: images must come from example.org'
_ROOT = "container has runAsNonRoot and image will run as root"


@pytest.mark.parametrize(
    ("pods", "events", "reason", "message"),
    [
        (
            [pod(0, phase="Pending", conditions=(_UNSCHEDULABLE,))],
            [],
            Reason.NO_CAPACITY,
            "node 0: no node fits: 0/3 nodes are available: 1 node(s) had",
        ),
        (
            [pod(0, phase="Pending", conditions=(condition("PodScheduled", "SchedulingGated", "gated", "False"),))],
            [],
            Reason.NO_CAPACITY,
            "node 0: a scheduling gate holds it",
        ),
        (
            [pod(1, waiting("ImagePullBackOff", 'Back-off pulling image "example.org/train:2"'), phase="Pending")],
            [],
            Reason.SETUP,
            'node 1: the image cannot be pulled: Back-off pulling image "example.org/train:2"',
        ),
        (
            [pod(0, waiting("ErrImagePull", "unauthorized"), phase="Pending")],
            [],
            Reason.SETUP,
            "node 0: the image cannot be pulled: example.org/train:2 (unauthorized)",
        ),
        (
            [pod(0, waiting("InvalidImageName"), phase="Pending")],
            [],
            Reason.SETUP,
            "the image's name is not valid: example.org/train:2",
        ),
        (
            [pod(0, waiting("CreateContainerConfigError", _ROOT), phase="Pending")],
            [],
            Reason.SETUP,
            "node 0: the container cannot be created: the image's user is root or has no number: run_as_user: 1000",
        ),
        (
            [pod(0, waiting("CreateContainerConfigError", 'secret "keys" not found'), phase="Pending")],
            [],
            Reason.SETUP,
            'node 0: the container cannot be created: secret "keys" not found',
        ),
        (
            [
                pod(
                    0,
                    waiting("CreateContainerConfigError", "couldn't find key token in Secret a/keys"),
                    phase="Pending",
                )
            ],
            [],
            Reason.SETUP,
            "node 0: the container cannot be created: couldn't find key token in Secret a/keys",
        ),
        ([pod(0, waiting("SomethingNew", "said so"), phase="Pending")], [], Reason.SETUP, "node 0: SomethingNew"),
        (
            [
                pod(
                    0,
                    waiting("PodInitializing"),
                    phase="Pending",
                    init=(waiting("ErrImagePull", "gone", name="accel-code"),),
                )
            ],
            [],
            Reason.SETUP,
            "the image cannot be pulled",
        ),
        ([pod(0, waiting("ContainerCreating"), phase="Pending")], [], Reason.NONE, ""),
        (
            [pod(0, waiting("ContainerCreating"), phase="Pending")],
            [
                event(
                    "FailedMount", 'MountVolume.SetUp failed for volume "accel-code": configmap "run1-code-0" not found'
                )
            ],
            Reason.SETUP,
            "node 0: a volume cannot be mounted: MountVolume.SetUp failed",
        ),
        (
            [pod(0, waiting("ContainerCreating"), phase="Pending")],
            [event("FailedCreatePodSandBox", "network plugin is not ready")],
            Reason.SETUP,
            "node 0: the pod's network or sandbox cannot be created: network plugin",
        ),
        (
            [],
            [event("FailedCreate", _QUOTA, "Job/run1")],
            Reason.NO_CAPACITY,
            "the namespace's quota does not allow its pods: pods",
        ),
        (
            [],
            [event("FailedCreatePod", _SECURITY, "PyTorchJob/run1")],
            Reason.SETUP,
            "the namespace's Pod Security Standard refuses its pods",
        ),
        (
            [],
            [event("FailedCreate", _WEBHOOK, "Job/run1-node-0")],
            Reason.SETUP,
            "an admission webhook refuses its pods: admission",
        ),
        (
            [],
            [
                event(
                    "FailedCreate",
                    'pods "a" is forbidden: error looking up service account team/x: serviceaccount "x" not found',
                    "Job/run1",
                )
            ],
            Reason.SETUP,
            "its service account does not exist",
        ),
        # JobSet and Trainer say of what they cannot make in events alone.
        (
            [],
            [event("JobCreationFailed", "job creation failed for: ttl: Invalid value", "JobSet/run1")],
            Reason.SETUP,
            "its pods cannot be created: job creation failed for: ttl",
        ),
        (
            [],
            [event("TrainJobResourcesCreationFailed", "error converting YAML", "TrainJob/run1")],
            Reason.SETUP,
            "its pods cannot be created: error converting YAML",
        ),
        (
            [pod(0, phase="Pending", conditions=(_NO_CLAIM,))],
            [],
            Reason.SETUP,
            'node 0: a volume claim does not exist: 0/2 nodes are available: persistentvolumeclaim "nope" not found',
        ),
        # So it goes in the first second of every pod, and the next try finds it.
        (
            [pod(0, waiting("ContainerCreating"), phase="Pending")],
            [event("FailedMount", _CACHE)],
            Reason.NONE,
            "",
        ),
        (
            [pod(0, waiting("ContainerCreating"), phase="Pending", uid="new")],
            [event("FailedMount", "configmap not found", uid="old")],
            Reason.NONE,
            "",
        ),
        (
            [pod(0, waiting("ContainerCreating"), phase="Pending", uid="new")],
            [event("FailedMount", "configmap not found", uid="new")],
            Reason.SETUP,
            "node 0: a volume cannot be mounted: configmap not found",
        ),
        ([], [event("SuccessfulCreate", "Created pod: a", "Job/run1", "Normal")], Reason.NONE, ""),
        (
            [],
            [event("FailedCreate", "old", "Job/run1", at="09:00:00"), event("FailedCreate", _QUOTA, "Job/run1")],
            Reason.NO_CAPACITY,
            "the namespace's quota",
        ),
    ],
)
def test_why_a_job_waits(pods: list[Any], events: list[Any], reason: Reason, message: str) -> None:
    found = status_of(workload("Job"), pods, events)
    assert (found.state, found.reason) == (State.QUEUED, reason)
    assert message in found.message
    assert message != "" or found.message == ""


def test_what_no_waiting_will_mend_is_said_before_what_it_may() -> None:
    found = status_of(
        workload("Job"),
        [pod(0, phase="Pending", conditions=(_UNSCHEDULABLE,)), pod(1, waiting("ErrImagePull", "x"), phase="Pending")],
    )
    assert found.reason is Reason.SETUP
    assert found.message.startswith("node 1: the image cannot be pulled")


def test_a_gang_of_which_a_part_runs() -> None:
    found = status_of(
        workload("Job", nodes=4), [pod(0, running()), pod(1, phase="Pending", conditions=(_UNSCHEDULABLE,))]
    )
    assert (found.state, found.reason) == (State.RUNNING, Reason.NO_CAPACITY)
    assert found.message.startswith("1 of 4 pods run; node 1: no node fits")


def test_events_of_the_other_api() -> None:
    about = {"regarding": {"kind": "Job", "name": "run1"}, "note": _QUOTA, "type": "Warning", "reason": "FailedCreate"}
    assert status_of(workload("Job"), [], [about]).reason is Reason.NO_CAPACITY


@pytest.mark.parametrize("kind", _KINDS)
def test_a_job_that_waits_for_its_queue(kind: str) -> None:
    queued = workload(kind, condition("Suspended"), labels={"kueue.x-k8s.io/queue-name": "team-a"})
    found = status_of(queued)
    assert (found.state, found.reason) == (State.QUEUED, Reason.NO_CAPACITY)
    assert found.message == "it waits for its turn in queue team-a"
    held = status_of(workload(kind, condition("Suspended")))
    assert (held.state, held.reason, held.native_state) == (State.QUEUED, Reason.USER, "Suspended")


def test_a_job_that_was_let_go_is_not_suspended_any_more() -> None:
    made = workload("PyTorchJob", condition("Suspended", status="False"), condition("Running"))
    made["spec"]["runPolicy"] = {"suspend": False}
    assert status_of(made, [pod(0, running(), operator=True)]).state is State.RUNNING


def test_restarts_are_attempts() -> None:
    again = running(2, ended(7, message="ValueError: no data"))
    found = status_of(
        workload("PyTorchJob", condition("Running")), [pod(0, again, operator=True), pod(1, running(1), operator=True)]
    )
    assert (found.state, found.attempt) == (State.RUNNING, 2)
    job = [
        pod(0, terminated(7), phase="Failed"),
        pod(1, terminated(143), phase="Failed"),
        pod(0, running()),
        pod(1, running()),
    ]
    assert status_of(workload("Job"), job).attempt == 1
    failed = status_of(workload("Job", condition("Failed", "BackoffLimitExceeded")), job[:2])
    assert failed.attempt == 0
    # A Job that is over its time deletes its pods, and counts those of the last attempt as failed.
    late = condition("Failed", "DeadlineExceeded")
    assert status_of(workload("Job", late, status={"failed": 2}), [pod(0, terminated(7), phase="Failed")]).attempt == 1
    assert status_of(workload("Job", late, status={"failed": 2}), job[:2]).attempt == 0
    assert status_of(workload("Job", late, status={"failed": 2}), []).attempt == 0
    assert status_of(workload("JobSet", status={"restarts": 3}), [pod(0, running())]).attempt == 3
    label = {"jobset.sigs.k8s.io/restart-attempt": "2"}
    assert status_of(workload("TrainJob"), [pod(0, running(name="node"), labels=label)]).attempt == 2


def test_a_pod_that_waits_to_be_started_again() -> None:
    back_off = waiting(
        "CrashLoopBackOff",
        "back-off 10s restarting failed container",
        lastState={"terminated": ended(7, message="ValueError")},
    )
    back_off["restartCount"] = 1
    found = status_of(workload("PyTorchJob", condition("Restarting")), [pod(0, back_off, operator=True)])
    assert (found.state, found.reason, found.attempt) == (State.QUEUED, Reason.EXIT_CODE, 1)
    assert found.message == "node 0: it failed and waits for a restart: ValueError"


def test_a_gang_between_two_attempts() -> None:
    over = [pod(0, terminated(7, message="ValueError"), phase="Failed"), pod(1, terminated(143), phase="Failed")]
    found = status_of(workload("Job"), over)
    assert (found.state, found.reason, found.attempt) == (State.QUEUED, Reason.EXIT_CODE, 1)
    assert found.message == "it is started again: node 0: ValueError"


def test_no_attempt_follows_the_last_one() -> None:
    """Between a pod's end and the condition Failed there are moments of which the object says nothing, or
    FailureTarget."""
    over = [pod(0, terminated(7, message="ValueError"), phase="Failed"), pod(1, terminated(143), phase="Failed")]
    made = workload("Job")
    made["spec"]["backoffLimit"] = 0
    for conditions in ([], [condition("FailureTarget", "BackoffLimitExceeded", "Job has reached the limit")]):
        made["status"]["conditions"] = conditions
        for pods in (over, [over[0], pod(1, running(), deleted=True)]):
            found = status_of(made, pods)
            assert (found.state, found.attempt) == (State.RUNNING, 0), (conditions, pods)
            assert "again" not in found.message
    made["spec"]["backoffLimit"] = 2
    again = status_of(made, over)  # FailureTarget stands, whatever the limit
    assert (again.state, again.reason, again.attempt) == (State.RUNNING, Reason.EXIT_CODE, 0)
    made["status"]["conditions"] = []
    again = status_of(made, over)
    assert (again.state, again.attempt) == (State.QUEUED, 1)
    assert again.message == "it is started again: node 0: ValueError"
    last = status_of(made, [*over, *over])
    assert (last.state, last.attempt) == (State.RUNNING, 1)
    for code in (126, 127, TIME_LIMIT):  # a Job fails at once by these, whatever its limit
        final = status_of(made, [pod(0, terminated(code), phase="Failed")])
        assert (final.state, final.attempt) == (State.RUNNING, 0), code


def test_a_container_that_the_kubelet_will_start_again() -> None:
    """It has ended, and does not wait yet."""
    made = workload("PyTorchJob", condition("Running"), nodes=1)
    made["spec"] = {"pytorchReplicaSpecs": {"Master": {"restartPolicy": "OnFailure"}}, "runPolicy": {"backoffLimit": 2}}
    ended_once = pod(0, terminated(5), operator=True, restart="OnFailure")
    found = status_of(made, [ended_once])
    assert (found.state, found.message) == (State.QUEUED, "it is started again: node 0: exit code 5")
    ended_once["status"]["containerStatuses"][0]["restartCount"] = 1
    assert (status_of(made, [ended_once]).state, status_of(made, [ended_once]).attempt) == (State.RUNNING, 1)


def test_a_jobset_between_two_attempts() -> None:
    over = [pod(0, terminated(7, message="ValueError"), phase="Failed")]
    made = workload("JobSet", status={"restarts": 1})
    made["spec"]["failurePolicy"] = {"maxRestarts": 2}
    assert status_of(made, over).message == "it is started again: node 0: ValueError"
    made["spec"]["failurePolicy"] = {"maxRestarts": 1}
    assert (status_of(made, over).state, status_of(made, over).attempt) == (State.RUNNING, 1)


def test_a_pytorchjob_has_no_more_attempts_than_it_may() -> None:
    """The kubelet may start a container once more before the operator counts."""
    made = workload("PyTorchJob", condition("Failed", "PyTorchJobFailed", "it has reached the specified backoff limit"))
    for role in made["spec"]["pytorchReplicaSpecs"].values():
        role["restartPolicy"] = "OnFailure"
    made["spec"]["runPolicy"] = {"backoffLimit": 1 * 2 + 1}
    restarted = [pod(0, running(2), operator=True, restart="OnFailure")]
    assert status_of(made, restarted).attempt == 1
    assert status_of(made, []).attempt == 1
    made["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxRestarts": 3}
    assert status_of(made, []).attempt == 3
    made["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    assert status_of(made, []).attempt == 0


@pytest.mark.parametrize("kind", _KINDS)
def test_a_job_is_not_over_while_its_pods_are_ending(kind: str) -> None:
    """The operator fails a job half a second after one of its pods is deleted; the others end in order, and speak."""
    operator = kind == "PyTorchJob"
    still = pod(0, running(), operator=operator)
    gone = pod(1, running(), operator=operator, deleted=True)
    gone["status"]["conditions"] = [condition("DisruptionTarget", "EvictionByEvictionAPI", "Eviction API: evicting")]
    for pods in ([still], [gone], [still, gone]):
        made = workload(kind, condition("Failed", at=seconds_ago(1)), condition("Running", status="False"))
        found = status_of(made, pods)
        assert (found.state, found.exit_code) == (State.RUNNING, None)
        assert found.message.startswith("it has failed, and its pods are ending")
    done = workload(kind, condition(_DONE[kind], at=seconds_ago(1)))
    assert status_of(done, [still]).state is State.RUNNING
    ended = pod(0, terminated(1), phase="Failed", operator=operator)
    assert status_of(made, [ended]).state is State.FAILED


def test_a_pod_that_goes_on_after_its_grace_does_not_hold_up_the_end() -> None:
    still = pod(0, running(), operator=True)
    made = workload("PyTorchJob", condition("Failed", at=seconds_ago(100)))
    assert status_of(made, [still]).state is State.FAILED
    still["metadata"]["deletionTimestamp"] = seconds_ago(100)
    made = workload("PyTorchJob", condition("Failed", at=seconds_ago(1)))
    assert status_of(made, [still]).state is State.FAILED


@pytest.mark.parametrize(
    ("kind", "about", "pods"),
    [
        ("PyTorchJob", "PyTorchJob/run1", [pod(0, running(), operator=True)]),
        ("PyTorchJob", "PyTorchJob/run1", []),
        ("Job", "Job/run1", [pod(0, running())]),
        ("JobSet", "Job/run1-node-0", [pod(0, running())]),
        ("TrainJob", "Job/run1-node-0", [pod(0, running(name="node"))]),
    ],
)
def test_next_pods_that_are_refused(kind: str, about: str, pods: list[Any]) -> None:
    made = workload(kind, condition("Running"))
    found = status_of(made, pods, [event("FailedCreatePod", _QUOTA, about)])
    assert (found.state, found.reason) == (State.RUNNING, Reason.NO_CAPACITY)
    assert found.message.startswith(f"{len(pods)} of 2 pods run; the namespace's quota does not allow its pods")


def test_an_event_of_an_earlier_object_of_that_name() -> None:
    made = workload("Job", uid="new")
    assert status_of(made, [], [event("FailedCreate", _QUOTA, "Job/run1", uid="old")]).reason is Reason.NONE
    assert status_of(made, [], [event("FailedCreate", _QUOTA, "Job/run1", uid="new")]).reason is Reason.NO_CAPACITY


def test_a_pod_on_a_node_that_is_lost() -> None:
    lost = condition("DisruptionTarget", "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
    pods = [pod(0, running()), pod(1, running(), conditions=(lost,), deleted=True)]
    found = status_of(workload("Job"), pods)
    assert (found.state, found.reason) == (State.RUNNING, Reason.NODE_FAILURE)
    assert found.message == "1 of 2 pods run; node 1: its node was lost, or tainted"


def test_a_job_that_is_being_deleted() -> None:
    found = status_of(workload("Job", deletionTimestamp="2026-11-21T10:00:00Z"), [pod(0, running())])
    assert (found.state, found.message) == (State.RUNNING, "it is being deleted")


def test_the_last_moments_of_a_job() -> None:
    pods = [
        pod(0, terminated(0, "Completed"), phase="Succeeded"),
        pod(1, terminated(0, "Completed"), phase="Succeeded"),
    ]
    found = status_of(workload("Job"), pods)
    assert (found.state, found.message) == (State.RUNNING, "it is ending")
    # A TrainJob does not say how often it may be started again: this may be its end, or between two attempts.
    found = status_of(workload("TrainJob"), [pod(node, terminated(1), phase="Failed") for node in (0, 1)])
    assert (found.state, found.message) == (State.RUNNING, "its pods have ended; it ends, or is started again")

    # The kubelet reports a container's end before the pod's phase; a pod that may restart ended for good with code 0.
    ended = [pod(0, terminated(0, "Completed")), pod(1, terminated(0, "Completed"), restart="OnFailure")]
    for kind in _KINDS:
        assert status_of(workload(kind), ended).state is State.RUNNING
    failed = [pod(0, terminated(1), operator=True), pod(1, terminated(1), operator=True)]
    assert status_of(workload("PyTorchJob", condition("Running")), failed).state is State.RUNNING
    refusal = event("FailedCreatePod", _QUOTA, "PyTorchJob/run1")
    gave_up = status_of(workload("PyTorchJob", condition("Running")), [pod(0, terminated(1))], [refusal])
    assert (gave_up.state, gave_up.reason) == (State.RUNNING, Reason.NO_CAPACITY)


def test_pods_that_are_no_part_of_the_gang_do_not_count() -> None:
    loader = {
        "metadata": {"name": "run1-loader", "labels": {}},
        "status": {"phase": "Failed", "reason": "DeadlineExceeded"},
    }
    assert status_of(workload("Job"), [loader, pod(0, running()), pod(1, running())]).message == ""


def test_a_message_is_one_short_line() -> None:
    long = pod(0, waiting("ErrImagePull", "x\n" * 900), phase="Pending")
    found = status_of(workload("Job"), [long])
    assert "\n" not in found.message
    assert len(found.message) <= 400


_LIMITED = [{"name": "ACCEL_TIME_LIMIT", "value": "60"}, {"name": "ACCEL_TIME_LIMIT_EXIT", "value": "0,0"}]


@pytest.mark.parametrize(
    ("completed_at", "pods", "state"),
    [
        ("10:01:00", [], State.FAILED),
        ("10:01:00", [pod(0, running(), operator=True)], State.FAILED),  # as last seen
        ("", [], State.FAILED),
        ("10:00:59", [], State.SUCCEEDED),
        ("10:01:00", [pod(0, terminated(0), phase="Succeeded", operator=True)], State.SUCCEEDED),
    ],
)
def test_an_unseen_end_after_the_time_limit_is_no_success(completed_at: str, pods: list[Any], state: State) -> None:
    """The launchers of a PyTorchJob with restarts exit with 0 at their time limit."""
    times = {"startTime": "2026-11-21T10:00:00Z"}
    if completed_at:
        times["completionTime"] = f"2026-11-21T{completed_at}Z"
    job = workload("PyTorchJob", condition("Succeeded"), nodes=1, status=times)
    template = {"spec": {"containers": [{"name": "pytorch", "env": _LIMITED}]}}
    job["spec"]["pytorchReplicaSpecs"] = {"Master": {"replicas": 1, "template": template}}
    status = status_of(job, pods)
    assert (status.state, status.exit_code) == (state, 0 if state is State.SUCCEEDED else None)
    if state is State.FAILED:
        assert status.reason is Reason.TIME_LIMIT
        assert status.message == "its pods are gone: its time limit may have ended it"
