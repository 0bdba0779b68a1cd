"""Polling of jobs, with one request per target, and recovery of submits that were cut off."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SchedulerError, StoreError, StoreNotWritable, UnknownJob, Unreachable
from ..job import Reason, State, Status
from ..processes import has_ended

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Target


# The result of a poll in a job's record.

# Seconds for which a job must be unknown to its backend before that counts: backends lag behind a submit.
ABSENT_S = 60.0
# The same for a job whose backend was never identified: the one that was polled may be another.
UNIDENTIFIED_S = 86_400.0
# Seconds for which a submit counts as running if its process is not visible.
ABANDONED_S = 60.0


class OtherBackend(Unreachable):
    """The backend that was polled is not, or may not be, the one that has the job."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A poll's answer about a job. `status`: None if the backend does not know it; `backend`: its identity or ""."""

    at: float
    status: Status | None = None
    backend: str = ""

    @property
    def missing(self) -> bool:
        """True if the backend does not know the job, or calls it lost: another one may have it."""
        return self.status is None or (self.status.state, self.status.reason) == (State.FAILED, Reason.LOST)


def poll_target(records: Sequence[Record], target: Target) -> dict[str, Answer | Unreachable]:
    """Poll the target once for these jobs; return an answer or an error for each, by job id.

    The backend is identified only for jobs that are missing there, or whose record does not have it yet. Raises what
    `Target.poll` raises, unless that tells which jobs it concerns.
    """
    polled_at = time.time()
    native_ids = {record.id: record.native_id or "" for record in records}
    silent: Mapping[str, str] = {}
    try:
        statuses = target.poll(list(native_ids.values()))
    except Unreachable as error:
        if error.silent is None:
            raise
        statuses, silent = error.answers, error.silent
    answers = {job_id: Answer(at=polled_at, status=statuses.get(native)) for job_id, native in native_ids.items()}
    result: dict[str, Answer | Unreachable] = {
        job_id: Unreachable(silent[native]) if native in silent else answers[job_id]
        for job_id, native in native_ids.items()
    }
    unsure = [r for r in records if r.native_id not in silent and (not r.backend or answers[r.id].missing)]
    try:
        for job_id, backend in identify(target, unsure).items():
            result[job_id] = dataclasses.replace(answers[job_id], backend=backend)
    except (SchedulerError, OSError) as error:
        result |= {record.id: Unreachable(str(error)) for record in unsure if answers[record.id].missing}
    return result


def apply_poll(record: Record, answer: Answer | Unreachable) -> Status:
    """Apply a poll's answer to the record and return the status in force.

    A job that its own backend does not know is over only if it left a result, or is still unknown a minute later; a
    job whose backend was never identified, a day later. A job that is lost or unknown after a cancel request counts as
    cancelled. If the store cannot be written, the status is in force for this record alone, with a warning. Raises
    Unreachable if the job was not polled, or not at its own backend; StoreError.
    """
    record.warning = ""
    if isinstance(answer, Unreachable):
        raise answer
    try:
        return _apply(record, answer)
    except StoreNotWritable as error:
        record.warning = f"not recorded: {error}"
        if answer.status is not None and not answer.missing:
            record.status = _observed(answer.status, answer.at)
        return record.status


def _apply(record: Record, answer: Answer) -> Status:
    if answer.missing or answer.status is None:
        return _missing(record, answer)
    if answer.backend and not record.backend:
        record.identify(answer.backend)
    status = record.update(_observed(answer.status, answer.at))
    if record.absent_since is not None:
        record.append("present")
    return status


def identify(target: Target, records: Iterable[Record]) -> Mapping[str, str]:
    """Return the identities of the jobs' backends, by job id; none if the kind of target has none. Raises as a poll."""
    from ..target import SupportsBackends

    native_ids = {record.id: record.native_id for record in records}
    return target.backends(native_ids) if native_ids and isinstance(target, SupportsBackends) else {}


def is_unidentified(record: Record) -> bool:
    """Return True if nothing shows which backend has the job: its record is an older accel's, or a plug-in's job."""
    from ..target import SupportsInUse

    kind = installed_kind(record.kind)
    return kind is None or not (record.backend or isinstance(kind, SupportsInUse))


def require_backend(record: Record, target: Target) -> None:
    """Record the target's backend before a submit is resumed. Raises OtherBackend if the job was sent to another."""
    backend = identify(target, [record]).get(record.id, "")
    check_backend(record, backend)
    if backend:
        record.identify(backend)


def _observed(status: Status, at: float) -> Status:
    return status if status.observed_at else dataclasses.replace(status, observed_at=at)


def _missing(record: Record, answer: Answer) -> Status:
    """Apply the answer of a backend that does not know the job, or has lost it."""
    record.reload()  # another process may have cancelled the job since this one read the record
    final_status = _result(record) if answer.status is None else None
    if final_status is not None:
        return record.update(final_status)
    check_backend(record, answer.backend)
    unidentified = is_unidentified(record)
    limit_s = UNIDENTIFIED_S if unidentified else ABSENT_S if answer.status is None else 0.0
    if limit_s and record.absent_since is None:
        record.append("absent")
    if limit_s and answer.at - (record.absent_since or answer.at) <= limit_s:
        hint = "; its backend was not recorded, so it counts as lost after a day" if unidentified else ""
        record.warning = f"target {record.target} does not know the job{hint}"
        return record.status
    message = f"target {record.target} no longer knows the job, and it left no result"
    lost = answer.status or Status(state=State.FAILED, reason=Reason.LOST, message=message)
    if record.cancel_requested:
        lost = dataclasses.replace(lost, state=State.CANCELLED, reason=Reason.USER, message="")
    return record.update(_observed(lost, answer.at))


def check_backend(record: Record, backend: str) -> None:
    """Raise OtherBackend unless `backend` is certainly the one that has the job, or that was never recorded."""
    from ..target import same_backend

    if not record.backend:
        return
    same = same_backend(record.backend, backend)
    if not same:
        known = f"is now {backend}" if same is False else "cannot tell which backend it uses now"
        raise OtherBackend(
            f"target {record.target} {known}, and job {record.id} was submitted to {record.backend}; "
            f"if that is gone for good: accel prune --force {record.id}"
        )


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
    from ..target import SupportsFind

    if not isinstance(target, SupportsFind):
        return False
    polled_at = time.time()
    try:
        discovered_job = target.find(record.id)
    except UnknownJob:  # sent there, not started
        discovered_job = None
    if discovered_job is None:
        if record.cancel_requested:
            backend = identify(target, [record]).get(record.id, "")
            apply_poll(record, Answer(at=polled_at, backend=backend))
        return False
    record.update(
        record.status, discovered_job.native_id, incomplete=record.cancel_requested or not discovered_job.whole
    )
    answer = poll_target([record], target)[record.id]
    if isinstance(answer, Answer) and answer.status is None:  # found, but not listed yet
        answer = dataclasses.replace(answer, status=Status(state=State.QUEUED, observed_at=polled_at))
    apply_poll(record, answer)
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
    groups = grouped([r for r in records if not r.incomplete or is_abandoned(r)], poll_key)
    if len(groups) < 2:
        for group in groups:
            _poll(group, shared)
        return
    from concurrent.futures import ThreadPoolExecutor

    # One unreachable target must not make the others wait for its timeout.
    with ThreadPoolExecutor(max_workers=min(16, len(groups))) as pool:
        list(pool.map(functools.partial(_poll, shared=shared), groups))


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> list[list[Record]]:
    """Return the records in groups with the same key."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def target_key(record: Record) -> str:
    """Return a key that is the same for records with the same target."""
    try:
        options = json.dumps(record.options(), sort_keys=True)
    except StoreError:
        options = record.id  # reported when its target is constructed
    return f"{record.kind}\0{record.target}\0{options}"


def poll_key(record: Record) -> str:
    """Return a key that is the same for records whose backend can be polled for all of them at once."""
    from ..target import SupportsPollKey

    kind = installed_kind(record.kind)
    try:
        if isinstance(kind, SupportsPollKey):
            return f"{record.kind}\0{json.dumps(kind.poll_key(record.options() or {}))}"
    except StoreError:  # reported when its target is constructed
        pass
    return target_key(record)


@functools.cache
def installed_kind(name: str) -> type | None:
    """Return the class of a kind of target, or None for a plug-in that is gone."""
    from ..target import load_kind

    try:
        return load_kind(name)
    except SchedulerError:  # reported when its target is constructed
        return None


def _poll(records: Sequence[Record], shared: dict[str, Target]) -> None:
    try:
        target = any_target(records, shared)
        records = _submitted(records, target)
        answers = poll_target(records, target) if records else {}
    except (SchedulerError, OSError) as error:
        for record in records:
            record.warning = str(error)
        return
    for record in records:
        try:
            apply_poll(record, answers[record.id])
        except (Unreachable, StoreError) as error:
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


def any_target(records: Sequence[Record], shared: dict[str, Target]) -> Target:
    """Return the target of the first record with valid options: each can poll all the jobs. Raises ConfigError."""
    for record in records[:-1]:
        with contextlib.suppress(SchedulerError):
            return cached_target(record, shared)
    return cached_target(records[-1], shared)


def cached_target(record: Record, shared: dict[str, Target]) -> Target:
    key = target_key(record)
    if key not in shared:
        shared[key] = restore(record)
    return shared[key]
