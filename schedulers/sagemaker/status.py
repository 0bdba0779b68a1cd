"""States of training jobs from the API's descriptions, and their native ids."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError, Unreachable
from ..job import Reason, State, Status
from ..printable import one_line
from .aws import Aws, AwsError

# The native id: `REGION/TRAINING JOB/JOB/CREATED`, the last in seconds since the epoch.


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
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or not parts[3].isdecimal():
            raise SpecError(f"{text!r} is not the id of a job of a sagemaker target (region/name/job/created)")
        return cls(region=parts[0], name=parts[1], job_id=parts[2], created_at=int(parts[3]))


# States.

_PAGE = 100
# Secondary status of a job that is not over -> state, reason, message.
_ACTIVE: Mapping[str, tuple[State, Reason, str]] = {
    "Starting": (State.QUEUED, Reason.NONE, "its instances are being prepared"),
    "Pending": (State.QUEUED, Reason.NO_CAPACITY, "it waits for instances"),
    "Downloading": (State.QUEUED, Reason.NONE, "its input is being downloaded"),
    "Training": (State.RUNNING, Reason.NONE, ""),
    "Updating": (State.RUNNING, Reason.NONE, ""),
    "Uploading": (State.RUNNING, Reason.NONE, "its artefacts are being uploaded"),
    "Stopping": (State.RUNNING, Reason.NONE, "it is being stopped"),
    "Interrupted": (State.QUEUED, Reason.PREEMPTED, "its spot instances were taken away; it waits for others"),
    "Restarting": (State.QUEUED, Reason.NODE_FAILURE, "AWS restarts it after an internal error"),
}
# Secondary status of a stopped job -> state, reason, message.
_STOPPED: Mapping[str, tuple[State, Reason, str]] = {
    "MaxRuntimeExceeded": (State.FAILED, Reason.TIME_LIMIT, "its time limit passed"),
    "MaxWaitTimeExceeded": (State.FAILED, Reason.NO_CAPACITY, "max_wait_time_in_seconds passed"),
    "MaxPendingTimeExceeded": (State.FAILED, Reason.NO_CAPACITY, "max_pending_time_in_seconds passed"),
}
# AWS answers ValidationException, with a text that may change; the names here are always valid.
_NO_SUCH_JOB = ("ResourceNotFound", "ValidationException")
_RESTARTED_STATES = ("Interrupted", "Restarting")
_CODE = re.compile(r",? *exit code: (\d+)\s*\Z", re.IGNORECASE)
_OURS = re.compile(r" \[accel (\w+)\]")
_KINDS: Mapping[str, Reason] = {
    "InternalServerError": Reason.NODE_FAILURE,
    "CapacityError": Reason.NO_CAPACITY,
    "ClientError": Reason.SETUP,
}


def status_of(job: Mapping[str, Any]) -> Status:
    """Return the status of a job from its DescribeTrainingJob response."""
    status, secondary = str(job.get("TrainingJobStatus")), str(job.get("SecondaryStatus") or "")
    past_statuses = [str(entry.get("Status")) for entry in job.get("SecondaryStatusTransitions") or []]
    attempt = sum(entry in _RESTARTED_STATES for entry in past_statuses)
    native = f"{status}: {secondary}" if secondary and secondary != status else status
    common: dict[str, Any] = {"attempt": attempt, "native_state": native, "details": _details(job)}
    if status == "Completed":
        return Status(state=State.SUCCEEDED, exit_code=0, **common)
    if status == "Failed":
        return _failed(str(job.get("FailureReason") or ""), common)
    if status == "Stopped":
        state, reason, message = _STOPPED.get(secondary, (State.CANCELLED, Reason.USER, ""))
        return Status(state=state, reason=reason, message=message, **common)
    state, reason, message = _ACTIVE.get(secondary, (State.QUEUED, Reason.NONE, secondary))
    last = (job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage") or ""
    if state is State.QUEUED and last and reason is Reason.NONE:
        message = one_line(str(last))
    return Status(state=state, reason=reason, message=message, **common)


def _details(job: Mapping[str, Any]) -> dict[str, Any]:
    training_s, billable_s = job.get("TrainingTimeInSeconds"), job.get("BillableTimeInSeconds")
    saving = None
    if job.get("EnableManagedSpotTraining") and training_s and billable_s is not None:
        saving = round(100 - 100 * billable_s / training_s)
    return {
        "secondary_status": job.get("SecondaryStatus"), "billable_seconds": billable_s, "training_seconds": training_s,
        "spot_saving_percent": saving,
    }  # fmt: skip


def _failed(text: str, common: Mapping[str, Any]) -> Status:
    kind, _, rest = text.partition(": ")
    code = _CODE.search(text)
    reason = _KINDS.get(kind, Reason.EXIT_CODE)
    rest = _CODE.sub("", rest if kind in (*_KINDS, "AlgorithmError") else text)
    match = _OURS.search(rest)
    if match is not None and match[1] in {known_reason.value for known_reason in Reason}:
        reason = Reason(match[1])
    message = one_line(_OURS.sub("", rest)).strip(" ,") or one_line(text)
    exit_code = int(code[1]) if code else None
    return Status(state=State.FAILED, reason=reason, exit_code=exit_code, message=message, **common)


class Poller:
    """A poller that describes only the jobs whose list entry has changed since the last time."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self._descriptions: dict[str, tuple[object, Status]] = {}

    def statuses(self, natives: Sequence[Native]) -> dict[str, Status]:
        """Return the status of each job; LOST if AWS does not know it. Raises Unreachable, AwsError."""
        if len(natives) == 1:
            return {str(natives[0]): self._described(natives[0])}
        pending = {native.name: native for native in natives}
        oldest = min(native.created_at for native in natives)
        created_after = datetime.datetime.fromtimestamp(oldest - 1, datetime.timezone.utc)
        order = {"SortBy": "CreationTime", "SortOrder": "Ascending"}
        statuses: dict[str, Status] = {}
        for summary in list_entries(self._aws, CreationTimeAfter=created_after, **order):
            native = pending.pop(summary["TrainingJobName"], None)
            if native is None:
                continue
            modified_at = summary.get("LastModifiedTime")
            cached = self._descriptions.get(native.name)
            if cached is None or modified_at is None or cached[0] != modified_at:
                cached = self._descriptions[native.name] = modified_at, self._described(native)
            statuses[str(native)] = cached[1]
            if not pending:
                break  # no more pages than needed
        return statuses | {str(native): self._described(native) for native in pending.values()}

    def _described(self, native: Native) -> Status:
        if native.region != self._aws.region:
            problem = f"{self._aws.label}: job {native.job_id} is in {native.region}"
            raise Unreachable(f"{problem}, but the target is in {self._aws.region}")
        job = describe(self._aws, native.name)
        if job is None:
            return Status(state=State.FAILED, reason=Reason.LOST, native_state="", message="AWS has no such job")
        return status_of(job)


def list_entries(aws: Aws, **parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the list entries of training jobs. Raises Unreachable, AwsError."""
    return aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=_PAGE, **parameters)


def describe(aws: Aws, name: str) -> dict[str, Any] | None:
    """Return the training job, or None."""
    try:
        return aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
    except AwsError as error:
        if error.code in _NO_SUCH_JOB:
            return None
        raise
