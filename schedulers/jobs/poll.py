"""Polling of jobs: one query per target for all of its jobs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import SchedulerError, StoreError, Unreachable
from ..job import Status
from .apply import absorb, cut_off
from .recovery import recover

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Gathers, Target


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
