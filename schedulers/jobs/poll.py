"""What a backend's answer, or its silence, means for the records in the store."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SchedulerError, StoreError, Unreachable
from ..job import Reason, State, Status
from ..processes import ended

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Gathers, Target

# How long a backend must go on not knowing a job before that counts: answers lag behind a submit.
ABSENT_S = 60.0
# How long a submit is believed to be going on when its process cannot be looked at.
ABANDONED_S = 60.0


def restore(record: Record) -> Target:
    """The target of the job, as it was when it was submitted. Raises ConfigError."""
    from pathlib import Path

    from ..config.named_targets import load_target, restore_target

    options, jobs = record.options(), Path(record.path).parent
    if options is None:
        return load_target(record.target, jobs)
    return restore_target(record.target, record.kind, options, jobs)


def poll_all(records: Sequence[Record], shared: dict[str, Target] | None = None) -> None:
    """Polls each target once for all its jobs, looks there for those whose submit was cut off, and records the answers.
    What goes wrong with one target, or one record, is a warning on the records concerned. `shared` holds targets that
    may be used, by `group`, and is added to."""
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
    """The same for records whose target is one and the same."""
    import json

    try:
        options = json.dumps(record.options(), sort_keys=True)
    except StoreError:
        options = record.id  # said when its target cannot be made
    return f"{record.kind}\0{record.target}\0{options}"


def _asked_with(record: Record) -> str:
    """The same for records whose backend can be asked about all of them at once."""
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
    """Those whose submit is complete, after the target was asked for the others."""
    from .recovery import recover

    complete = [record for record in records if not record.incomplete]
    for record in records:
        if record.incomplete:
            try:
                recover(record, target)
            except StoreError as error:
                record.warning = str(error)
    return complete


def _any_target(records: Sequence[Record], shared: dict[str, Target]) -> Target:
    """That of the first record whose options can still be meant: each can be asked about all. Raises ConfigError."""
    for record in records[:-1]:
        with contextlib.suppress(SchedulerError):
            return _restored(record, shared)
    return _restored(records[-1], shared)


def _restored(record: Record, shared: dict[str, Target]) -> Target:
    key = group(record)
    if key not in shared:
        shared[key] = restore(record)
    return shared[key]


def absorb(record: Record, answer: Status | None, asked_at: float) -> Status:
    """Records what the backend said of the job (None: it does not know it) and returns the status in force.

    A job that the backend does not know is over only when it left a result, or when a minute later the backend still
    does not know it. One that is lost, or not known, after accel was asked to cancel it is cancelled. Raises
    StoreError.
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
    """The status in exit.json, which outlives the backend's memory of the job."""
    document = record.read_exit()
    if document is None or "state" not in document:
        return None
    try:
        status = Status.from_json(document)
    except ValueError as error:
        raise StoreError(f"{record.path}/exit.json is damaged: {error}") from None
    return status if status.state.final else None


def cut_off(record: Record) -> bool:
    """Return True when the process that submitted the job is gone, or has taken so long that it must be."""
    gone = ended(record.submitter[1], record.submitted_from)
    return gone or time.time() - record.created_at > ABANDONED_S
