"""What AWS says of a training job, and what it means."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from schedulers import Reason, State, Status
from schedulers.errors import ConfigError
from schedulers.sagemaker import status
from schedulers.sagemaker.aws import Aws

from .support import options


def made(overall: str, second: str = "", *passed: str, why: str | None = None) -> dict[str, Any]:
    transitions = [{"Status": each, "StatusMessage": ""} for each in (*passed, second)]
    found: dict[str, Any] = {"TrainingJobStatus": overall, "SecondaryStatus": second or overall}
    found["SecondaryStatusTransitions"] = transitions
    return found | ({} if why is None else {"FailureReason": why})


@pytest.mark.parametrize(
    ("described", "state", "reason", "attempt"),
    [
        (made("InProgress", "Starting"), State.QUEUED, Reason.NONE, 0),
        (made("InProgress", "Pending"), State.QUEUED, Reason.NO_CAPACITY, 0),
        (made("InProgress", "Downloading"), State.QUEUED, Reason.NONE, 0),
        (made("InProgress", "Training"), State.RUNNING, Reason.NONE, 0),
        (made("InProgress", "Uploading"), State.RUNNING, Reason.NONE, 0),
        (made("Stopping", "Stopping"), State.RUNNING, Reason.NONE, 0),
        (made("InProgress", "Interrupted", "Training"), State.QUEUED, Reason.PREEMPTED, 1),
        (made("InProgress", "Training", "Training", "Interrupted", "Starting"), State.RUNNING, Reason.NONE, 1),
        (made("InProgress", "Restarting", "Training", "Interrupted", "Training"), State.QUEUED, Reason.NODE_FAILURE, 2),
        (made("Stopped", "MaxRuntimeExceeded"), State.FAILED, Reason.TIME_LIMIT, 0),
        (made("Stopped", "MaxWaitTimeExceeded", "Interrupted"), State.FAILED, Reason.NO_CAPACITY, 1),
        (made("Stopped", "Stopped"), State.CANCELLED, Reason.USER, 0),
        (made("Completed"), State.SUCCEEDED, Reason.NONE, 0),
        (made("InProgress", "SomethingNew"), State.QUEUED, Reason.NONE, 0),
    ],
)
def test_states(described: dict[str, Any], state: State, reason: Reason, attempt: int) -> None:
    found = status.status_of(described)
    assert (found.state, found.reason, found.attempt) == (state, reason, attempt)


@pytest.mark.parametrize(
    ("more", "billed", "trained", "saving"),
    [
        ({}, None, None, None),
        ({"TrainingTimeInSeconds": 100, "BillableTimeInSeconds": 100}, 100, 100, None),
        ({"EnableManagedSpotTraining": True, "TrainingTimeInSeconds": 100, "BillableTimeInSeconds": 33}, 33, 100, 67),
        ({"EnableManagedSpotTraining": True, "TrainingTimeInSeconds": 0, "BillableTimeInSeconds": 0}, 0, 0, None),
        ({"EnableManagedSpotTraining": True, "TrainingTimeInSeconds": 9}, None, 9, None),
    ],
)
def test_details(more: dict[str, Any], billed: int | None, trained: int | None, saving: int | None) -> None:
    found = status.status_of({**made("InProgress", "Training"), **more})
    assert found.details == {
        "secondary_status": "Training", "billable_seconds": billed, "training_seconds": trained,
        "spot_saving_percent": saving,
    }  # fmt: skip
    assert Status.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("why", "reason", "code", "message"),
    [
        ("AlgorithmError: rank 3 on node 1: ValueError: no data [accel exit_code], exit code: 3",
         Reason.EXIT_CODE, 3, "rank 3 on node 1: ValueError: no data"),
        ("AlgorithmError: rank 0 on node 0: CUDA out of memory [accel out_of_memory], exit code: 1",
         Reason.OUT_OF_MEMORY, 1, "rank 0 on node 0: CUDA out of memory"),
        ("AlgorithmError: the image cannot run accel: torch is not installed, exit code: 1",
         Reason.EXIT_CODE, 1, "the image cannot run accel: torch is not installed"),
        ("AlgorithmError: , exit code: 137", Reason.EXIT_CODE, 137, "AlgorithmError: , exit code: 137"),
        ("InternalServerError: We encountered an internal error.", Reason.NODE_FAILURE, None,
         "We encountered an internal error."),
        ("CapacityError: Unable to provision requested ML compute capacity.", Reason.NO_CAPACITY, None,
         "Unable to provision requested ML compute capacity."),
        ("ClientError: Data download failed: no bucket", Reason.SETUP, None, "Data download failed: no bucket"),
        ("", Reason.EXIT_CODE, None, ""),
    ],
)  # fmt: skip
def test_why_a_job_failed(why: str, reason: Reason, code: int | None, message: str) -> None:
    found = status.status_of(made("Failed", why=why))
    assert (found.state, found.reason, found.exit_code, found.message) == (State.FAILED, reason, code, message)


def test_without_boto3_a_submit_says_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"target aws: the package boto3 is not installed: pip install 'accel-launch"):
        Aws(options(), "aws").call("sts", "get_caller_identity")
