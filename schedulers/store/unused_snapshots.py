"""Deletion of packed code that no job uses any more."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import atomic_files
from .record import Damaged, Record
from .snapshot import alone

_KEPT_S = 86400.0
_CLOCKS_S = 3600.0
# A snapshot, packed once more for a target, or what a process that died meanwhile left of it.
_FILE = re.compile(r"[0-9a-f]{64}\.tar(\.gz)?(\.[0-9a-f.]+)?\Z")


def prune_snapshots(home: Path, jobs: Iterable[Record | Damaged], *, dry_run: bool = False) -> list[str]:
    """Delete the snapshots in `home` that none of `jobs`, all jobs there, uses, and return their digests.

    A snapshot is kept for a day, while a job names it, over or not, and while a job that is not over may use it:
    if it was packed, or found packed, after the first such job was submitted. This is safe during submits,
    whether or not they are in `jobs` yet. Raises StoreError if a job or a snapshot cannot be read or deleted.
    """
    directory = os.path.join(home, "snapshots")
    jobs = list(jobs)
    try:
        named, before = {_named_by(job.path) for job in jobs}, min(_limits(jobs))
        names = [name for name in sorted(os.listdir(directory)) if _FILE.match(name) and name not in named]
        old = [name for name in names if _is_old(os.path.join(directory, name), before)]
        gone = old if dry_run else [name for name in old if _delete(directory, name, before)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise atomic_files.refusal(error, directory, "clear") from error
    return [name.removesuffix(".tar") for name in gone if name.endswith(".tar")]


def _named_by(job: str) -> str | None:
    """Return the name of the snapshot that the local job in this directory runs, or ran, a copy of."""
    path = atomic_files.read_bytes(os.path.join(job, "local", "snapshot"))
    return None if path is None else os.path.basename(os.fsdecode(path))


def _limits(jobs: Iterable[Record | Damaged]) -> Iterator[float]:
    """Yield times; a snapshot packed before all of them is unused."""
    yield time.time() - _KEPT_S
    for job in jobs:
        if not isinstance(job, Record):
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(job.path, "plan.json")).st_mtime - _CLOCKS_S
        elif not job.status.state.final:
            # Times of jobs are this machine's, those of files may be a server's.
            yield job.created_at - _CLOCKS_S


def _is_old(path: str, before: float) -> bool:
    """Return True if the snapshot exists and was packed, or last found packed, before that time."""
    try:
        return os.stat(path).st_mtime < before
    except FileNotFoundError:
        return False


def _delete(directory: str, name: str, before: float) -> bool:
    """Delete the snapshot, unless a submit has reused it; return True if deleted."""
    path = os.path.join(directory, name)
    with alone(directory):
        old = _is_old(path, before)
        if old:
            os.unlink(path)
    return old
