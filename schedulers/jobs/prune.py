"""Deletion of finished jobs: first the data that their targets store, then their records."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SchedulerError
from ..job import Reason
from ..store import atomic_files
from ..store.record import CorruptRecord, Record
from ..target import SupportsClear, SupportsInUse, SupportsRunning, Target
from .poll import (
    OtherBackend,
    any_target,
    cached_target,
    check_backend,
    grouped,
    identify,
    installed_kind,
    is_unidentified,
    poll_key,
    target_key,
)

if TYPE_CHECKING:
    from ..store.store import Store


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """The result of pruning.

    ids:          jobs whose records are gone (or would be), newest first.
    kept_reasons: a line for each thing that is kept.
    """

    ids: tuple[str, ...]
    kept_reasons: tuple[str, ...] = ()


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    keep: int | None = None,
    ids: Sequence[str] | None = None,
    dry_run: bool = False,
    force: bool = False,
    records: Sequence[Record | CorruptRecord] | None = None,
) -> Pruned:
    """Delete jobs as `Store.prune` does, after their targets have deleted the data they store.

    `records`: all jobs of the store, if they have been read.

    A target that cannot be reached keeps its data, and the rest goes on. Of a job that another machine submitted,
    only the record here goes, unless the job is named (`ids`): that machine may still need its logs. Each backend is
    queried once, and what still runs there is kept regardless of its status; so is a job whose end nobody has stated,
    if its backend cannot tell.

    With `force`, the jobs of `ids` are deleted in any state, unless they run in their directories. A line says where
    each may still run; what its target stores of it stays. Raises StoreError.
    """
    all_records = store.records() if records is None else records
    chosen = store.prunable(all_records, older_than_s, keep, ids, force)
    chosen_ids = set(chosen)
    records = [record for record in all_records if record.id in chosen_ids]
    kept_jobs, shared = _in_use(records), dict[str, Target]()
    if not force:
        stored = [record for record in records if isinstance(record, Record) and record.id not in kept_jobs]
        kept_jobs |= _running([record for record in stored if ids is not None or not record.adopted], shared)
    kept_reasons = [f"job {job_id} is kept: {reason}" for job_id, reason in kept_jobs.items()]
    records = [record for record in records if record.id not in kept_jobs]
    chosen = [job_id for job_id in chosen if job_id not in kept_jobs]
    if dry_run or not chosen:
        return Pruned(ids=tuple(chosen), kept_reasons=tuple(kept_reasons))
    kept_reasons += _clear(records, shared, include_adopted=ids is not None)
    return Pruned(ids=tuple(store.delete(chosen)), kept_reasons=tuple(kept_reasons))


def _in_use(records: Sequence[Record | CorruptRecord]) -> dict[str, str]:
    """Return why each of these jobs may still run in its directory."""
    reasons: dict[str, str] = {}
    load = functools.cache(installed_kind)
    for record in records:
        with contextlib.suppress(SchedulerError, OSError):
            kind = load(record.kind if isinstance(record, Record) else _kind(record.path))
            if isinstance(kind, SupportsInUse) and (reason := kind.in_use(record.directory)):
                reasons[record.id] = reason
    return reasons


def _kind(path: str) -> str:
    return str((atomic_files.read_document(f"{path}/target.json") or {}).get("kind", ""))


def _running(records: Sequence[Record], shared: dict[str, Target]) -> dict[str, str]:
    """Return why each of these jobs may still run. Queries each backend once.

    A backend that cannot tell, or is another, keeps only jobs whose end no backend has stated.
    """
    reasons: dict[str, str] = {}
    for group in grouped(records, poll_key):
        unstated = [record for record in group if not _has_stated_end(record)]
        backends: Mapping[str, str] = {}
        answers: Mapping[str, str | SchedulerError] = {}
        try:
            target = any_target(group, shared)
            if isinstance(target, SupportsRunning):
                answers = target.running({record.id: record.native_id for record in group})
            with contextlib.suppress(SchedulerError, OSError):  # what runs is known all the same
                backends = identify(target, unstated)
        except (SchedulerError, OSError) as error:
            answers = {record.id: SchedulerError(str(error)) for record in group}
        reasons |= {job_id: f"it still runs: {answer}" for job_id, answer in answers.items() if isinstance(answer, str)}
        for record in unstated:
            if record.id not in reasons and (problem := _doubt(record, answers.get(record.id), backends)):
                hint = f"if it is over: accel prune --force {record.id}"
                reasons[record.id] = f"its end is not confirmed, and it may still run: {problem}; {hint}"
    return reasons


def _has_stated_end(record: Record) -> bool:
    """Return True if a known backend, or the job itself, has stated how the job ended; or it was never sent."""
    if record.status.reason is Reason.LOST:
        return False
    never_sent = record.native_id is None
    return never_sent or bool(record.backend) or not is_unidentified(record) or record.read_exit() is not None


def _doubt(record: Record, answer: str | SchedulerError | None, backends: Mapping[str, str]) -> str:
    """Return why the answer does not confirm the end of a job whose end was not stated; "" if it does."""
    if isinstance(answer, SchedulerError):
        return str(answer)
    try:
        check_backend(record, backends.get(record.id, ""))
    except OtherBackend as error:
        return str(error).partition(";")[0]
    if record.status.reason is Reason.LOST and is_unidentified(record):
        return f"target {record.target} does not know job {record.id}, which may never have been sent"
    return ""


def _clear(records: Sequence[Record | CorruptRecord], shared: dict[str, Target], *, include_adopted: bool) -> list[str]:
    """Have the targets delete what they store of these jobs. Return a line for each thing that was not deleted."""
    clearable: list[Record] = []
    skipped = []
    for record in records:
        if not isinstance(record, Record):
            continue
        if not record.status.state.final or (record.status.reason is Reason.LOST and is_unidentified(record)):
            native_id, backend = record.native_id or "an unknown id", f" ({record.backend})" if record.backend else ""
            skipped.append(
                f"job {record.id} was {record.status.state.value}: it may still run as {native_id} on target "
                f"{record.target}{backend}"
            )
        elif include_adopted or not record.adopted:
            clearable.append(record)
    for group in grouped(clearable, target_key):
        try:
            target = cached_target(group[0], shared)
            if isinstance(target, SupportsClear):
                skipped += target.clear({record.id: record.native_id for record in group})
        except (SchedulerError, OSError) as error:
            count = f"{len(group)} job{'s' * (len(group) > 1)}"
            skipped.append(f"target {group[0].target}: {error}; data of {count} not deleted")
    return skipped
