"""Why a job failed: the first failure of the gang, in words and with the exit code that people look for."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers import Reason, State
from schedulers.kubernetes.status.job_states import status_of
from tests.schedulers.kubernetes.shapes import condition, pod, terminated, waiting, workload

_DISK = "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 900Mi."

_GREETING = "accel launch: 2 nodes, node 0 at run1-master-0:29500, from the training operator\n"
_DISRUPTED = "Pod team/run1-0-x has condition DisruptionTarget matching FailJob rule at index 1"


@pytest.mark.parametrize(
    ("kind", "failed", "pods", "reason", "code", "message"),
    [
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"),
            [
                pod(0, terminated(143), phase="Failed"),
                pod(1, terminated(7, message="loading\nValueError: no data\n"), phase="Failed"),
            ],
            Reason.EXIT_CODE,
            7,
            "node 1: ValueError: no data",
        ),
        # Who failed first counts; echoes of it do not, though they may be told earlier.
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [
                pod(0, terminated(1, at="10:00:09"), phase="Failed"),
                pod(1, terminated(3, at="10:00:07"), phase="Failed"),
            ],
            Reason.EXIT_CODE,
            3,
            "node 1: exit code 3",
        ),
        (
            "JobSet",
            condition("Failed", "ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"),
            [pod(0, terminated(137, "OOMKilled"), phase="Failed"), pod(1, terminated(1), phase="Failed")],
            Reason.OUT_OF_MEMORY,
            137,
            "node 0: it used more memory than the pod may (--memory)",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [pod(0, phase="Failed", reason="Evicted", message=_DISK)],
            Reason.PREEMPTED,
            None,
            f"node 0: its pod was evicted: {_DISK}",
        ),
        # Not its neighbours, but the job itself.
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [
                pod(
                    0,
                    terminated(137),
                    phase="Failed",
                    reason="Evicted",
                    message="Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. ",
                    conditions=(condition("DisruptionTarget", "TerminationByKubelet"),),
                )
            ],
            Reason.EXIT_CODE,
            137,
            "node 0: it used more local storage than the pod may (resources: ephemeral-storage): Pod ephemeral local",
        ),
        # The last line of a log is no reason for a kill.
        (
            "PyTorchJob",
            condition("Failed", "PyTorchJobFailed"),
            [pod(0, terminated(137, "OOMKilled", message=_GREETING), phase="Failed", operator=True)],
            Reason.OUT_OF_MEMORY,
            137,
            "node 0: it used more memory than the pod may (--memory)",
        ),
        (
            "PyTorchJob",
            condition("Failed", "PyTorchJobFailed"),
            [pod(0, terminated(137, message=_GREETING), phase="Failed", operator=True)],
            Reason.EXIT_CODE,
            137,
            "node 0: exit code 137",
        ),
        (
            "Job",
            condition("Failed", "PodFailurePolicy", _DISRUPTED),
            [],
            Reason.PREEMPTED,
            None,
            "its pod was evicted or preempted, or its node was lost",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [
                pod(
                    0,
                    terminated(137),
                    phase="Failed",
                    conditions=(
                        condition(
                            "DisruptionTarget",
                            "DeletionByTaintManager",
                            "Taint manager: deleting due to NoExecute taint",
                        ),
                    ),
                )
            ],
            Reason.NODE_FAILURE,
            137,
            "node 0: its node was lost, or tainted: Taint manager",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [
                pod(
                    0,
                    terminated(143),
                    phase="Failed",
                    conditions=(condition("DisruptionTarget", "PreemptionByScheduler", "preempted"),),
                )
            ],
            Reason.PREEMPTED,
            143,
            "node 0: its pod was preempted by one of higher priority: preempted",
        ),
        (
            "Job",
            condition("Failed", "DeadlineExceeded", "Job was active longer than specified deadline"),
            [pod(0, terminated(143), phase="Failed")],
            Reason.TIME_LIMIT,
            None,
            "its time limit passed",
        ),
        (
            "PyTorchJob",
            condition(
                "Failed", "PyTorchJobFailed", "Job run1 has failed because it was active longer than specified deadline"
            ),
            [],
            Reason.TIME_LIMIT,
            None,
            "its time limit passed",
        ),
        (
            "PyTorchJob",
            condition("Failed", "PyTorchJobFailed", "PyTorchJob run1 is failed because 1 Worker replica(s) failed."),
            [pod(1, terminated(7), phase="Failed", operator=True)],
            Reason.EXIT_CODE,
            7,
            "node 1: exit code 7",
        ),
        (
            "PyTorchJob",
            condition(
                "Failed", "PyTorchJobFailed", "Job run1 has failed because it has reached the specified backoff limit"
            ),
            [],
            Reason.EXIT_CODE,
            None,
            "Job run1 has failed because it has reached the specified backoff limit",
        ),
        (
            "Job",
            condition("Failed", "PodFailurePolicy", "Container pytorch for pod a/b failed with exit code 127"),
            [pod(0, terminated(127, message="sh: accel: not found"), phase="Failed")],
            Reason.SETUP,
            127,
            "its program could not be run: sh: accel: not found",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [
                pod(
                    0,
                    waiting("PodInitializing"),
                    phase="Failed",
                    init=(terminated(1, message="accel: the code is not what was submitted", name="accel-code"),),
                )
            ],
            Reason.SETUP,
            1,
            "node 0: the code could not be delivered: accel: the code is not",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [pod(0, terminated(128, "StartError", "exec: no such file"), phase="Failed")],
            Reason.SETUP,
            128,
            "node 0: the container could not be started: exec: no such file",
        ),
        (
            "Job",
            condition("Failed", "BackoffLimitExceeded"),
            [pod(0, phase="Failed", reason="UnexpectedAdmissionError", message="no devices")],
            Reason.NO_CAPACITY,
            None,
            "node 0: its node could not give it its devices: no devices",
        ),
        (
            "TrainJob",
            condition("Failed", "JobsCreationFailed", "quota"),
            [],
            Reason.SETUP,
            None,
            "its pods could not be created",
        ),
        ("JobSet", condition("Failed", "SomethingNew", "said so"), [], Reason.EXIT_CODE, None, "said so"),
    ],
)
def test_why_a_job_failed(
    kind: str, failed: dict[str, Any], pods: list[Any], reason: Reason, code: int | None, message: str
) -> None:
    found = status_of(workload(kind, failed), pods)
    assert (found.state, found.reason, found.exit_code) == (State.FAILED, reason, code)
    assert found.message.startswith(message)
    assert "\n" not in found.message
    assert "accel launch" not in found.message


@pytest.mark.parametrize(
    ("kind", "limited", "pods", "reason", "code", "message"),
    [
        ("JobSet", True, [], Reason.TIME_LIMIT, None, "its time limit passed"),
        ("JobSet", True, [pod(0, terminated(143), phase="Failed")], Reason.TIME_LIMIT, None, "its time limit passed"),
        ("JobSet", True, [pod(1, terminated(127), phase="Failed")], Reason.SETUP, 127, "its program could not be run"),
        ("JobSet", False, [], Reason.SETUP, None, "its program could not be run"),
        # Its time limit is its own, and not its JobSet's.
        ("TrainJob", False, [pod(0, terminated(126), phase="Failed")], Reason.SETUP, 126, "its program could not be"),
    ],
)
def test_why_no_attempt_followed(
    kind: str, limited: bool, pods: list[Any], reason: Reason, code: int | None, message: str
) -> None:
    """A JobSet says the same of both: of a time limit, and of a program that is not there."""
    said = "applying FailJobSet failure policy action (first failed job: run1-node-0)"
    made = workload(kind, condition("Failed", "FailJobSetFailurePolicyAction", said))
    if limited:
        made["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] = 60
    found = status_of(made, pods)
    assert (found.state, found.reason, found.exit_code) == (State.FAILED, reason, code)
    assert found.message.startswith(message)
