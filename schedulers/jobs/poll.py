"""Ask each target once about all of its jobs, record the answers, and recover jobs whose submit was cut off."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SchedulerError, StoreError, UnknownJob, Unreachable
from ..job import Reason, State, Status
from ..processes import ended

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Gathers, Target


# Record an answer about a job, or its absence.

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


# Recover jobs whose submit was cut off, or cancelled before it had ended: find them on their target, end them if asked.
#
# For a record that is `incomplete`, the backend may have the job, or a part of it. Nothing here submits.


def recover(record: Record, target: Target) -> None:
    """Record the target's state of a job whose submit was cut off; do nothing while a process submits it.

    An error, or a job that is not found, becomes a warning on the record. Raises StoreError.
    """
    with record.submission(blocking=False) as ours:
        if not ours or not record.reload().incomplete or record.status.state.final:
            return
        try:
            known = find_submitted(record, target) or record.status.state.final
            if not known and not record.warning and cut_off(record):
                record.warning = f"its submit was cut off; `accel status {record.id}` carries it out"
        except (SchedulerError, OSError) as error:
            record.warning = str(error)


def find_submitted(record: Record, target: Target) -> bool:
    """Look for the job on its target and record its native id and state. Return False if it is not found.

    Returns False also for a target that cannot find jobs. A job with a cancel request is cancelled; its submit
    stays incomplete until the target has confirmed that. If the target still does not have such a job a minute
    later, it is over. Call it with the submission's lock held. Raises the errors of querying the target,
    StoreError.
    """
    from ..target import Finds

    if not isinstance(target, Finds):
        return False
    asked_at = time.time()
    try:
        found = target.find(record.id)
    except UnknownJob:  # put there and not started
        found = None
    if found is None:
        if record.cancel_asked:
            absorb(record, None, asked_at)
        return False
    record.update(record.status, found.native_id, incomplete=record.cancel_asked or not found.whole)
    answer = target.poll([found.native_id]).get(found.native_id)
    absorb(record, answer or Status(state=State.QUEUED, observed_at=asked_at), asked_at)
    if record.cancel_asked and not record.status.state.final:
        target.cancel(found.native_id)
        record.update(record.status, found.native_id)
    return True


# Poll.


def restore(record: Record) -> Target:
    """Construct the job's target as it was when the job was submitted. Raises ConfigError."""
    from pathlib import Path

    from ..config.named_targets import load_target, restore_target

    options, jobs = record.options(), Path(record.path).parent
    if options is None:
        return load_target(record.target, jobs)
    return restore_target(record.target, record.kind, options, jobs)


def poll_all(records: Sequence[Record], shared: dict[str, Target] | None = None) -> None:
    """Poll each target once for all its jobs and record the results.

    Jobs whose submit was cut off are looked up on their targets. An error of one target, or one record, becomes a
    warning on the records concerned. `shared` is a cache of targets by `group`, which is added to.
    """
    shared = {} if shared is None else shared
    groups: dict[str, list[Record]] = {}
    for record in records:
        if not record.incomplete or cut_off(record):
            groups.setdefault(_asked_with(record), []).append(record)
    if len(groups) < 2:
        for those in groups.values():
            _poll(those, shared)
        return
    from concurrent.futures import ThreadPoolExecutor

    # One unreachable target must not make the others wait for its timeout.
    with ThreadPoolExecutor(max_workers=min(16, len(groups))) as pool:
        list(pool.map(functools.partial(_poll, shared=shared), groups.values()))


def group(record: Record) -> str:
    """Return a key that is the same for records with the same target."""
    import json

    try:
        options = json.dumps(record.options(), sort_keys=True)
    except StoreError:
        options = record.id  # said when its target cannot be made
    return f"{record.kind}\0{record.target}\0{options}"


def _asked_with(record: Record) -> str:
    """Return a key that is the same for records whose backend can be polled for all of them at once."""
    import json

    kind = _gathering(record.kind)
    try:
        if kind is not None:
            return f"{record.kind}\0{json.dumps(kind.asked_with(record.options() or {}))}"
    except StoreError:  # said when its target is made
        pass
    return group(record)


@functools.cache
def _gathering(name: str) -> Gathers | None:
    from ..target import Gathers, load_kind

    try:
        kind = load_kind(name)
    except SchedulerError:  # said when its target is made
        return None
    return kind if isinstance(kind, Gathers) else None


def _poll(records: Sequence[Record], shared: dict[str, Target]) -> None:
    asked_at = time.time()
    silent: Mapping[str, str] = {}
    try:
        target = _any_target(records, shared)
        records = _submitted(records, target)
        answers: Mapping[str, Status] = target.poll([record.native_id or "" for record in records]) if records else {}
    except (SchedulerError, OSError) as error:
        if isinstance(error, Unreachable) and error.silent is not None:
            answers, silent = error.answers, error.silent
        else:
            for record in records:
                record.warning = str(error)
            return
    for record in records:
        native_id = record.native_id or ""
        if native_id in silent:
            record.warning = silent[native_id]
            continue
        try:
            absorb(record, answers.get(native_id), asked_at)
        except StoreError as error:
            record.warning = str(error)


def _submitted(records: Sequence[Record], target: Target) -> list[Record]:
    """Return the records whose submit is complete, and look for the others on the target."""
    complete = [record for record in records if not record.incomplete]
    for record in records:
        if record.incomplete:
            try:
                recover(record, target)
            except StoreError as error:
                record.warning = str(error)
    return complete


def _any_target(records: Sequence[Record], shared: dict[str, Target]) -> Target:
    """Return the target of the first record with valid options: each can poll all the jobs. Raises ConfigError."""
    for record in records[:-1]:
        with contextlib.suppress(SchedulerError):
            return _restored(record, shared)
    return _restored(records[-1], shared)


def _restored(record: Record, shared: dict[str, Target]) -> Target:
    key = group(record)
    if key not in shared:
        shared[key] = restore(record)
    return shared[key]
