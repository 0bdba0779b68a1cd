"""Deletion of finished jobs: first the data that their targets store, then their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SchedulerError
from ..job import Reason
from ..store import atomic_files
from ..target import Clears, RunsInPlace, load_kind
from .poll import is_unidentified, restore, target_key

if TYPE_CHECKING:
    from ..store.record import CorruptRecord, Record
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
) -> Pruned:
    """Delete jobs as `Store.prune` does, after their targets have deleted the data they store.

    A target that cannot be reached keeps its data, and the rest goes on. Of a job that another machine submitted,
    only the record here goes, unless the job is named (`ids`): that machine may still need its logs. A job that
    may still run in its directory is kept, whatever its status, and so is one that was lost without proof.

    With `force`, the jobs of `ids` are deleted in any state, unless they run in their directories. A line says where
    each may still run; what its target stores of it stays. Raises StoreError.
    """
    chosen = store.prune(older_than_s=older_than_s, keep=keep, ids=ids, dry_run=True, force=force)
    in_use = _jobs_in_use(store, set(chosen), force=force)
    chosen = [job_id for job_id in chosen if job_id not in in_use]
    if dry_run or not chosen:
        return Pruned(ids=tuple(chosen), kept_reasons=tuple(in_use.values()))
    skipped = [*in_use.values(), *_clear(store, set(chosen), include_adopted=ids is not None)]
    stored_ids = set(store.ids())  # another process may have pruned some of them meanwhile
    to_delete = [job_id for job_id in chosen if job_id in stored_ids]
    pruned = store.prune(ids=to_delete, force=force) if to_delete else []
    return Pruned(ids=tuple(pruned), kept_reasons=tuple(skipped))


def _jobs_in_use(store: Store, chosen: set[str], *, force: bool) -> dict[str, str]:
    """Return a line for each of these jobs that may still run in its directory, or elsewhere."""
    lines = {}
    for record in store.records():
        if record.id in chosen:
            reason = _in_use(record) or ("" if force else _lost_without_proof(record))
            if reason:
                lines[record.id] = f"job {record.id} is kept: {reason}"
    return lines


def _in_use(record: Record | CorruptRecord) -> str:
    from ..store.record import Record

    try:
        kind = load_kind(record.kind if isinstance(record, Record) else _kind(record.path))
        return kind.in_use(record.directory) if isinstance(kind, RunsInPlace) else ""
    except (SchedulerError, OSError):  # a plug-in that is gone, or a damaged record: its processes are unknown
        return ""


def _lost_without_proof(record: Record | CorruptRecord) -> str:
    """Return why the job may still run although it counts as lost: the backend that forgot it was never identified."""
    from ..store.record import Record

    if not isinstance(record, Record) or record.status.reason is not Reason.LOST or not is_unidentified(record):
        return ""
    hint = f"if not: accel prune --force {record.id}"
    return f"target {record.target} did not know it, but nothing shows that it was sent there; it may still run; {hint}"


def _kind(path: str) -> str:
    return str((atomic_files.read_document(f"{path}/target.json") or {}).get("kind", ""))


def _clear(store: Store, chosen: set[str], *, include_adopted: bool) -> list[str]:
    from ..store.record import Record

    groups: dict[str, list[Record]] = {}
    skipped = []
    for record in store.records():
        if not isinstance(record, Record) or record.id not in chosen:
            continue
        if not record.status.state.final or _lost_without_proof(record):
            native_id, backend = record.native_id or "an unknown id", f" ({record.backend})" if record.backend else ""
            skipped.append(
                f"job {record.id} was {record.status.state.value}: it may still run as {native_id} on target "
                f"{record.target}{backend}"
            )
        elif include_adopted or not record.adopted:
            groups.setdefault(target_key(record), []).append(record)
    for records in groups.values():
        try:
            target = restore(records[0])
            if isinstance(target, Clears):
                skipped += target.clear({record.id: record.native_id for record in records})
        except (SchedulerError, OSError) as error:
            count = f"{len(records)} job{'s' * (len(records) > 1)}"
            skipped.append(f"target {records[0].target}: {error}; its data of {count} stays")
    return skipped
