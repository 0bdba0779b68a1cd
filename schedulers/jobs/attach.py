"""Jobs submitted by another machine: found on a target by id and added to this store, or only listed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SchedulerError, SpecError, StoreError, UnknownJob
from ..store.store import CorruptRecord, Record, Store, full_id

if TYPE_CHECKING:
    from ..config.named_targets import ResolvedTarget
    from ..job import Status
    from ..target import DiscoveredJob, JobSummary


def find_or_attach(
    ref: str, store: Store, target: str | None, options: Mapping[str, Any]
) -> tuple[Record, ResolvedTarget | None]:
    """Return the job's record, and its target if the job was found there now.

    A job without a record here is looked up on `target`, if there is one, by its full id, and recorded. Any
    number of machines may have a record of one job. If a job from another machine is over, and the target has
    created another one under its id since, that one's record replaces it.

    Raises UnknownJob if neither knows it, and the errors of constructing and querying the target.
    """
    try:
        record = store.record(ref)
    except UnknownJob as unknown:
        job_id = full_id(ref)
        if job_id is None:
            hint = "" if target is None else f"; to find it on target {target}, give its full id"
            raise UnknownJob(f"{unknown}{hint}") from None
        if target is None:
            hint = f"accel status {job_id} --target NAME looks for it there"
            raise UnknownJob(f"no job {job_id} here; if another machine submitted it, {hint}") from None
        return _attach(job_id, store, target, options)
    if target is not None and record.adopted and record.status.state.final:
        with contextlib.suppress(SchedulerError):  # if it cannot be queried, the record stands
            return _attach(record.id, store, target, options, old_record=record)
    return record, None


def _attach(
    job_id: str, store: Store, target: str, options: Mapping[str, Any], old_record: Record | None = None
) -> tuple[Record, ResolvedTarget | None]:
    from ..config.named_targets import resolve_target
    from ..target import SupportsFind

    resolved = resolve_target(target, store.jobs, overrides=options)
    if not isinstance(resolved.target, SupportsFind):
        raise SpecError(f"target {target} ({resolved.kind}) cannot find jobs of other machines")
    discovered_job = resolved.target.find(job_id)
    if discovered_job is None:
        raise UnknownJob(f"no job {job_id}, here or on target {target}")
    if old_record is not None:
        if not _replaces(discovered_job, old_record):
            return old_record, None
        store.prune(ids=[job_id])
    try:
        record = store.create(
            job_id,
            discovered_job.spec,
            dataclasses.replace(discovered_job.plan, source=resolved.source),
            target=resolved.name,
            kind=resolved.kind,
            options=resolved.options,
            native_id=discovered_job.native_id,
            made_at=discovered_job.created_at,
        )
    except StoreError:
        # Another process may have stored the job at the same time.
        if job_id not in store.ids():
            raise
        record = store.record(job_id)
    return record, resolved


def _replaces(job: DiscoveredJob | JobSummary, record: Record | CorruptRecord) -> bool:
    """Return True if the record's job is over and the target has since created this one under its id."""
    if isinstance(record, CorruptRecord) or not record.adopted or not record.status.state.final:
        return False
    return job.native_id != record.native_id and (job.created_at or 0.0) > record.created_at


def jobs_elsewhere(
    target: str, store: Store, records: Mapping[str, Record | CorruptRecord], options: Mapping[str, Any] | None = None
) -> list[Record]:
    """Return the jobs that a target has and this store does not (`records`: its records by id), polled now.

    The records have no files and are not stored. There are none for a kind of target that cannot list its jobs.
    Raises the errors of constructing and querying the target.
    """
    from ..config.named_targets import resolve_target
    from ..target import SupportsListed

    resolved = resolve_target(target, store.jobs, overrides=options)
    if not isinstance(resolved.target, SupportsListed):
        return []
    jobs = resolved.target.listed()
    unstored_jobs = [job for job in jobs if job.job_id not in records or _replaces(job, records[job.job_id])]
    polled_at = time.time()
    statuses = resolved.target.poll([job.native_id for job in unstored_jobs]) if unstored_jobs else {}
    return [
        _unstored(job, resolved, dataclasses.replace(statuses[job.native_id], observed_at=polled_at))
        for job in unstored_jobs
        if job.native_id in statuses  # else it was deleted between the two queries
    ]


def _unstored(job: JobSummary, resolved: ResolvedTarget, status: Status) -> Record:
    return Record(
        id=job.job_id,
        path="",
        name=job.name,
        target=resolved.name,
        kind=resolved.kind,
        nodes=job.nodes,
        created_at=job.created_at,
        native_id=job.native_id,
        status=status,
        adopted=True,
        owner=job.owner,
    )
