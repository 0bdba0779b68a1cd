"""Updates of a job's record from poll results."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..job import Reason, State, Status
from ..processes import ended

if TYPE_CHECKING:
    from ..store.record import Record

# How long a backend must go on not knowing a job before that counts: answers lag behind a submit.
ABSENT_S = 60.0
# How long a submit is believed to be going on when its process cannot be looked at.
ABANDONED_S = 60.0


def absorb(record: Record, answer: Status | None, asked_at: float) -> Status:
    """Apply a poll result (None: the backend does not know the job) and return the status in force.

    A job that the backend does not know is over only if it left a result, or is still unknown a minute later. A
    job that is lost or unknown after a cancel request counts as cancelled. Raises StoreError.
    """
    record.warning = ""
    if answer is None:
        return _absent(record, asked_at)
    import dataclasses

    if answer.state is State.FAILED and answer.reason is Reason.LOST and record.cancel_asked:
        answer = dataclasses.replace(answer, state=State.CANCELLED, reason=Reason.USER, message="")
    answer = answer if answer.observed_at else dataclasses.replace(answer, observed_at=asked_at)
    status = record.update(answer)
    if record.absent_since is not None:
        record.append("present")
    return status


def _absent(record: Record, asked_at: float) -> Status:
    left = _result(record)
    if left is not None:
        return record.update(left)
    if record.absent_since is None:
        record.append("absent")
    elif asked_at - record.absent_since > ABSENT_S:
        if record.cancel_asked:
            return record.update(Status(state=State.CANCELLED, reason=Reason.USER, observed_at=asked_at))
        message = f"target {record.target} no longer knows the job, and it left no result"
        return record.update(Status(state=State.FAILED, reason=Reason.LOST, message=message, observed_at=asked_at))
    record.warning = f"target {record.target} does not know the job"
    return record.status


def _result(record: Record) -> Status | None:
    """Return the final status in exit.json, which outlives the backend's memory of the job."""
    document = record.read_exit()
    if document is None or "state" not in document:
        return None
    try:
        status = Status.from_json(document)
    except ValueError as error:
        raise StoreError(f"{record.path}/exit.json is damaged: {error}") from None
    return status if status.state.final else None


def cut_off(record: Record) -> bool:
    """Return True if the submitting process has ended, or must have: the submit began over a minute ago."""
    gone = ended(record.submitter[1], record.submitted_from)
    return gone or time.time() - record.created_at > ABANDONED_S
