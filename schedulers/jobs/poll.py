"""Polling of jobs, with one request per target, and recovery of submits that were cut off."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SchedulerError, StoreError, UnknownJob, Unreachable
from ..job import Reason, State, Status
from ..processes import has_ended

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Gathers, Target


# The result of a poll in a job's record.

# Seconds for which a job must be unknown to its backend before that counts: backends lag behind a submit.
ABSENT_S = 60.0
# Seconds for which a submit counts as running if its process is not visible.
ABANDONED_S = 60.0


def apply_poll(record: Record, polled_status: Status | None, polled_at: float) -> Status:
    """Apply a poll result (None: the backend does not know the job) and return the status in force.

    A job that the backend does not know is over only if it left a result, or is still unknown a minute later. A
    job that is lost or unknown after a cancel request counts as cancelled. Raises StoreError.
    """
    record.warning = ""
    if polled_status is None:
        return _absent(record, polled_at)
    import dataclasses

    if polled_status.state is State.FAILED and polled_status.reason is Reason.LOST and record.cancel_requested:
        polled_status = dataclasses.replace(polled_status, state=State.CANCELLED, reason=Reason.USER, message="")
    polled_status = (
        polled_status if polled_status.observed_at else dataclasses.replace(polled_status, observed_at=polled_at)
    )
    status = record.update(polled_status)
    if record.absent_since is not None:
        record.append("present")
    return status


def _absent(record: Record, polled_at: float) -> Status:
    final_status = _result(record)
    if final_status is not None:
        return record.update(final_status)
    if record.absent_since is None:
        record.append("absent")
    elif polled_at - record.absent_since > ABSENT_S:
        if record.cancel_requested:
            return record.update(Status(state=State.CANCELLED, reason=Reason.USER, observed_at=polled_at))
        message = f"target {record.target} no longer knows the job, and it left no result"
        return record.update(Status(state=State.FAILED, reason=Reason.LOST, message=message, observed_at=polled_at))
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


def is_abandoned(record: Record) -> bool:
    """Return True if the submitting process has ended, or must have: the submit began over a minute ago."""
    submitter_ended = has_ended(record.submitter[1], record.submitted_from)
    return submitter_ended or time.time() - record.created_at > ABANDONED_S


# Recovery of submits that were cut off: the backend may have the `incomplete` job, or a part of it. Submits nothing.


def recover(record: Record, target: Target) -> None:
    """Record the target's state of a job whose submit was cut off; do nothing while a process submits it.

    An error, or a job that is not found, becomes a warning on the record. Raises StoreError.
    """
    with record.submission(blocking=False) as acquired:
        if not acquired or not record.reload().incomplete or record.status.state.final:
            return
        try:
            known = find_submitted(record, target) or record.status.state.final
            if not known and not record.warning and is_abandoned(record):
                record.warning = f"its submit was cut off; `accel status {record.id}` resumes it"
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
    polled_at = time.time()
    try:
        discovered_job = target.find(record.id)
    except UnknownJob:  # sent there, not started
        discovered_job = None
    if discovered_job is None:
        if record.cancel_requested:
            apply_poll(record, None, polled_at)
        return False
    record.update(
        record.status, discovered_job.native_id, incomplete=record.cancel_requested or not discovered_job.whole
    )
    status = target.poll([discovered_job.native_id]).get(discovered_job.native_id)
    apply_poll(record, status or Status(state=State.QUEUED, observed_at=polled_at), polled_at)
    if record.cancel_requested and not record.status.state.final:
        target.cancel(discovered_job.native_id)
        record.update(record.status, discovered_job.native_id)
    return True


# Polls of targets.


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
    warning on the records concerned. `shared` is a cache of targets by `target_key`; new ones are added.
    """
    shared = {} if shared is None else shared
    groups: dict[str, list[Record]] = {}
    for record in records:
        if not record.incomplete or is_abandoned(record):
            groups.setdefault(_poll_key(record), []).append(record)
    if len(groups) < 2:
        for group_records in groups.values():
            _poll(group_records, shared)
        return
    from concurrent.futures import ThreadPoolExecutor

    # One unreachable target must not make the others wait for its timeout.
    with ThreadPoolExecutor(max_workers=min(16, len(groups))) as pool:
        list(pool.map(functools.partial(_poll, shared=shared), groups.values()))


def target_key(record: Record) -> str:
    """Return a key that is the same for records with the same target."""
    import json

    try:
        options = json.dumps(record.options(), sort_keys=True)
    except StoreError:
        options = record.id  # reported when its target is constructed
    return f"{record.kind}\0{record.target}\0{options}"


def _poll_key(record: Record) -> str:
    """Return a key that is the same for records whose backend can be polled for all of them at once."""
    import json

    kind = _load_gatherer(record.kind)
    try:
        if kind is not None:
            return f"{record.kind}\0{json.dumps(kind.poll_key(record.options() or {}))}"
    except StoreError:  # reported when its target is constructed
        pass
    return target_key(record)


@functools.cache
def _load_gatherer(name: str) -> Gathers | None:
    from ..target import Gathers, load_kind

    try:
        kind = load_kind(name)
    except SchedulerError:  # reported when its target is constructed
        return None
    return kind if isinstance(kind, Gathers) else None


def _poll(records: Sequence[Record], shared: dict[str, Target]) -> None:
    polled_at = time.time()
    unreachable: Mapping[str, str] = {}
    try:
        target = _any_target(records, shared)
        records = _submitted(records, target)
        statuses: Mapping[str, Status] = target.poll([record.native_id or "" for record in records]) if records else {}
    except (SchedulerError, OSError) as error:
        if isinstance(error, Unreachable) and error.silent is not None:
            statuses, unreachable = error.answers, error.silent
        else:
            for record in records:
                record.warning = str(error)
            return
    for record in records:
        native_id = record.native_id or ""
        if native_id in unreachable:
            record.warning = unreachable[native_id]
            continue
        try:
            apply_poll(record, statuses.get(native_id), polled_at)
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
            return _cached_target(record, shared)
    return _cached_target(records[-1], shared)


def _cached_target(record: Record, shared: dict[str, Target]) -> Target:
    key = target_key(record)
    if key not in shared:
        shared[key] = restore(record)
    return shared[key]
