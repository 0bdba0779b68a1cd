"""States of training jobs, from what the API says of them, and the id by which a job is named."""

from __future__ import annotations

import datetime
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, Unreachable
from ..job import Reason, State, Status
from ..printable import one_line
from .aws import Aws, Refused

# The id: `REGION/TRAINING JOB/JOB/CREATED`, the last in seconds since the epoch.


@dataclass(frozen=True, kw_only=True)
class Native:
    region: str
    name: str
    job_id: str
    created_at: int

    def __str__(self) -> str:
        return f"{self.region}/{self.name}/{self.job_id}/{self.created_at}"

    @classmethod
    def parse(cls, text: str) -> Native:
        """Parse the output of `str`. Raises SpecError."""
        words = text.split("/")
        if len(words) != 4 or not all(words) or not words[3].isdecimal():
            raise SpecError(f"{text!r} is not the id of a job of a sagemaker target (region/name/job/created)")
        return cls(region=words[0], name=words[1], job_id=words[2], created_at=int(words[3]))


# States.

_PAGE = 100
# What AWS says of a job that is not over, by its secondary status -> state, reason, words.
_GOING: Mapping[str, tuple[State, Reason, str]] = {
    "Starting": (State.QUEUED, Reason.NONE, "its instances are being prepared"),
    "Pending": (State.QUEUED, Reason.NO_CAPACITY, "it waits for instances"),
    "Downloading": (State.QUEUED, Reason.NONE, "its input is being downloaded"),
    "Training": (State.RUNNING, Reason.NONE, ""),
    "Updating": (State.RUNNING, Reason.NONE, ""),
    "Uploading": (State.RUNNING, Reason.NONE, "its artefacts are being uploaded"),
    "Stopping": (State.RUNNING, Reason.NONE, "it is being stopped"),
    "Interrupted": (State.QUEUED, Reason.PREEMPTED, "its spot instances were taken away; it waits for others"),
    "Restarting": (State.QUEUED, Reason.NODE_FAILURE, "AWS starts it again after an error of its own"),
}
# Why a job was stopped.
_STOPPED: Mapping[str, tuple[State, Reason, str]] = {
    "MaxRuntimeExceeded": (State.FAILED, Reason.TIME_LIMIT, "its time limit passed"),
    "MaxWaitTimeExceeded": (State.FAILED, Reason.NO_CAPACITY, "max_wait_time_in_seconds passed"),
    "MaxPendingTimeExceeded": (State.FAILED, Reason.NO_CAPACITY, "max_pending_time_in_seconds passed"),
}
_AGAIN = ("Interrupted", "Restarting")
_CODE = re.compile(r",? *exit code: (\d+)\s*\Z", re.IGNORECASE)
_OURS = re.compile(r" \[accel (\w+)\]")
_KINDS: Mapping[str, Reason] = {
    "InternalServerError": Reason.NODE_FAILURE,
    "CapacityError": Reason.NO_CAPACITY,
    "ClientError": Reason.SETUP,
}


def of(made: Mapping[str, Any]) -> Status:
    """Return the status of a job from its DescribeTrainingJob response."""
    status, second = str(made.get("TrainingJobStatus")), str(made.get("SecondaryStatus") or "")
    passed = [str(each.get("Status")) for each in made.get("SecondaryStatusTransitions") or []]
    attempt = sum(each in _AGAIN for each in passed)
    native = f"{status}: {second}" if second and second != status else status
    said: dict[str, Any] = {"attempt": attempt, "native_state": native, "details": _details(made)}
    if status == "Completed":
        return Status(state=State.SUCCEEDED, exit_code=0, **said)
    if status == "Failed":
        return _failed(str(made.get("FailureReason") or ""), said)
    if status == "Stopped":
        state, reason, message = _STOPPED.get(second, (State.CANCELLED, Reason.USER, ""))
        return Status(state=state, reason=reason, message=message, **said)
    state, reason, message = _GOING.get(second, (State.QUEUED, Reason.NONE, second))
    last = (made.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage") or ""
    if state is State.QUEUED and last and reason is Reason.NONE:
        message = one_line(str(last))
    return Status(state=state, reason=reason, message=message, **said)


def _details(made: Mapping[str, Any]) -> dict[str, Any]:
    trained, billed = made.get("TrainingTimeInSeconds"), made.get("BillableTimeInSeconds")
    saving = 1 - billed / trained if made.get("EnableManagedSpotTraining") and trained and billed is not None else None
    return {
        "secondary_status": made.get("SecondaryStatus"), "billable_seconds": billed, "training_seconds": trained,
        "spot_saving_percent": None if saving is None else round(100 * saving),
    }  # fmt: skip


def _failed(text: str, said: Mapping[str, Any]) -> Status:
    kind, _, rest = text.partition(": ")
    code = _CODE.search(text)
    reason = _KINDS.get(kind, Reason.EXIT_CODE)
    rest = _CODE.sub("", rest if kind in (*_KINDS, "AlgorithmError") else text)
    ours = _OURS.search(rest)
    if ours is not None and ours[1] in {each.value for each in Reason}:
        reason = Reason(ours[1])
    message = one_line(_OURS.sub("", rest)).strip(" ,") or one_line(text)
    exit_code = int(code[1]) if code else None
    return Status(state=State.FAILED, reason=reason, exit_code=exit_code, message=message, **said)


class Poller:
    """A poller that describes only the jobs whose list entry has changed since the last time."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self._seen: dict[str, tuple[object, Status]] = {}
        self._lock = threading.Lock()

    def statuses(self, natives: Sequence[Native]) -> dict[str, Status]:
        """Return the status of each job; LOST if AWS does not know it. Raises Unreachable, Refused."""
        if len(natives) == 1:
            return {str(natives[0]): self._described(natives[0])}
        wanted = {native.name: native for native in natives}
        found: dict[str, Status] = {}
        for summary in self._listed(min(native.created_at for native in natives), set(wanted)):
            native = wanted.pop(str(summary["TrainingJobName"]))
            changed = summary.get("LastModifiedTime")
            with self._lock:
                known = self._seen.get(native.name)
            if known is None or changed is None or known[0] != changed:
                known = changed, self._described(native)
                with self._lock:
                    self._seen[native.name] = known
            found[str(native)] = known[1]
        return found | {str(native): self._described(native) for native in wanted.values()}

    def _listed(self, since: int, wanted: set[str]) -> list[dict[str, Any]]:
        """Return the list entries of these jobs, oldest first, from no more pages than needed."""
        after = datetime.datetime.fromtimestamp(since - 1, datetime.timezone.utc)
        asked = {"CreationTimeAfter": after, "SortBy": "CreationTime", "SortOrder": "Ascending", "MaxResults": _PAGE}
        entries = self._aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", **asked)
        return list(itertools.islice((each for each in entries if each["TrainingJobName"] in wanted), len(wanted)))

    def _described(self, native: Native) -> Status:
        if native.region != self._aws.region:
            here = f"{self._aws.where}: job {native.job_id} is in {native.region}"
            raise Unreachable(f"{here}, and the target in {self._aws.region}")
        made = describe(self._aws, native.name)
        if made is None:
            return Status(state=State.FAILED, reason=Reason.LOST, native_state="", message="AWS has no such job")
        return of(made)


def describe(aws: Aws, name: str) -> dict[str, Any] | None:
    """Return the training job, or None."""
    try:
        return aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
    except Refused as error:
        if error.code == "ValidationException" and "not found" in error.said:
            return None
        raise


def stop(aws: Aws, native: Native) -> None:
    """Stop the job: SIGTERM, 120 s, SIGKILL. Do nothing if it is over."""
    try:
        aws.call("sagemaker", "stop_training_job", TrainingJobName=native.name)
    except Refused:
        made = describe(aws, native.name)
        if made is not None and made["TrainingJobStatus"] == "InProgress":
            raise
