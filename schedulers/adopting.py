"""Jobs that another machine submitted: looked for on a target by their id, and taken into this store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import SpecError, StoreError, UnknownJob

if TYPE_CHECKING:
    from pathlib import Path

    from .config import ResolvedTarget
    from .record import Record
    from .store import Store


def record_or_adopt(
    ref: str, store: Store, target: str | None, options: Mapping[str, Any] | None, start: Path | str | None = None
) -> tuple[Record, ResolvedTarget | None]:
    """The record of a job that is known here; else, with a target, that of the job which the target has under this id,
    and the target. Any number of machines may have a record of one job.

    Raises UnknownJob when neither knows it, and what making the target and asking it raises.
    """
    from .store import full_id

    try:
        return store.record(ref), None
    except UnknownJob as unknown:
        job_id = full_id(ref)
        if job_id is None:
            hint = "" if target is None else f"; to be looked for on target {target}, a job needs its whole id"
            raise UnknownJob(f"{unknown}{hint}") from None
        if target is None:
            hint = f"accel status {job_id} --target NAME looks for it there"
            raise UnknownJob(f"no job {job_id} here; if another machine submitted it, {hint}") from None
    return _adopted(job_id, store, target, options or {}, start)


def _adopted(
    job_id: str, store: Store, target: str, options: Mapping[str, Any], start: Path | str | None
) -> tuple[Record, ResolvedTarget]:
    from .config import resolve_target
    from .target import Finds

    resolved = resolve_target(target, store.jobs, start=start, overrides=options)
    if not isinstance(resolved.target, Finds):
        raise SpecError(f"target {target} ({resolved.kind}) cannot be asked for a job that this machine did not submit")
    found = resolved.target.find(job_id)
    if found is None:
        raise UnknownJob(f"no job {job_id}, here or on target {target}")
    try:
        record = store.create(
            job_id,
            found.spec,
            dataclasses.replace(found.plan, source=resolved.source),
            target=resolved.name,
            kind=resolved.kind,
            options=resolved.options,
            native_id=found.native_id,
        )
    except StoreError:
        # Another process has been as quick, unless that is not what is wrong.
        if job_id not in store.ids():
            raise
        record = store.record(job_id)
    return record, resolved
