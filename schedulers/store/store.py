"""The job store: a directory per job in `$ACCEL_HOME/jobs`. No database: homes on clusters are NFS and Lustre."""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import StoreError, UnknownJob, nearest
from ..job import JobSpec
from . import atomic_files, paths
from .record import CorruptRecord, Event, Record, first_row, read_record

if TYPE_CHECKING:
    from pathlib import Path

    from ..target import Plan

__all__ = ["CorruptRecord", "Event", "Record", "Store"]

# Crockford's base 32, small letters: digits sort before letters, and i, l, o, u are left out.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_LOOKALIKES = str.maketrans("ilo", "110")
_EPOCH_MS = 1_704_067_200_000  # 2024-01-01
_RANDOM_BITS = 15
_ID_LENGTH = 11
_ID = re.compile(r"[0-9a-z][0-9a-z_-]{0,62}\Z")
# Ids that are hashes (helm/accel-job) begin with it; ids that hold the time have not since January 2025.
_TIMELESS = "0"
_ABANDONED_S = 3600.0


class Store:
    """All jobs below one home directory. Holds nothing in memory: any number of processes may use the same home."""

    def __init__(self, home: Path | str) -> None:
        self._home = os.path.abspath(home)
        self._jobs = f"{self._home}/jobs"

    @classmethod
    def default(cls) -> Store:
        """Return the store in `$ACCEL_HOME`, else in the user's data directory."""
        return cls(paths.data_home())

    # pathlib is imported on use: listing jobs needs no Path.

    @property
    def home(self) -> Path:
        """The directory of the store."""
        from pathlib import Path

        return Path(self._home)

    @property
    def jobs(self) -> Path:
        """The directory that holds a directory for each job."""
        return self.home / "jobs"

    def new_id(self) -> str:
        """Return a new id: 8 characters of time, 3 random ones. Ids sort by age, within one process always."""
        return _encode(_next_number())

    def create(
        self,
        job_id: str,
        spec: JobSpec,
        plan: Plan,
        *,
        target: str,
        kind: str,
        options: Mapping[str, Any] | None = None,
        native_id: str | None = None,
        made_at: float | None = None,
        backend: str = "",
        files: Mapping[str, bytes] | None = None,
    ) -> Record:
        """Store a new job with the status `submitting`. When this returns, the whole job is on disk.

        `options` are the target's, stored so that the job can be polled from any directory. A `native_id` marks a job
        that another machine submitted: `adopted`, never to be submitted here, `queued` until its target is polled,
        and created at `made_at`, or at the time in its id. `backend`: its identity, if known. `files`: name -> content,
        of further files in its directory.

        Raises StoreError if it cannot be written or the id exists, SpecError if the spec holds what JSON cannot.
        """
        if not _ID.match(job_id):
            raise StoreError(f"{job_id!r} is not a job id")
        if native_id is not None and made_at is None:
            made_at = created_at(job_id)
        documents: dict[str, dict[str, Any]] = {
            "spec.json": {"spec": spec.to_json()},
            "plan.json": {"plan": plan.to_json()},
            "target.json": {"name": target, "kind": kind, "options": dict(options or {}), "source": plan.source},
            "events.jsonl": first_row(
                spec, target=target, kind=kind, backend=backend, native_id=native_id, created_at=made_at
            ),
        }
        texts = {
            name: atomic_files.encode({"schema": atomic_files.SCHEMA, **data}, name) + b"\n"
            for name, data in documents.items()
        }
        if options is None:
            del texts["target.json"]
        path = f"{self._jobs}/{job_id}"
        self._make_home()
        try:
            self._publish(job_id, path, {**texts, **(files or {})})
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise StoreError(f"job {job_id} exists already") from None
            raise atomic_files.store_error(error, path, "write") from error
        return read_record(job_id, path)

    def record(self, ref: str) -> Record:
        """Return the job with that id or unique prefix, or `@last`, the newest. Raises UnknownJob, StoreError."""
        job_id = self.resolve(ref)
        return read_record(job_id, f"{self._jobs}/{job_id}")

    def resolve(self, ref: str) -> str:
        """Return the full id that `ref` stands for. Raises UnknownJob, naming the candidates if there are several."""
        ids = self.ids()
        if not ids:
            raise UnknownJob(f"no job {ref!r}: {self._jobs} has no jobs")
        if ref == "@last":
            return ids[0]
        if ref in ids:
            return ref
        prefix = ref.lower()
        matches = [i for i in ids if i.startswith(prefix)] if prefix else []
        if not matches and prefix:
            # Misread from a screen: i and l for 1, o for 0.
            matches = [i for i in ids if i.startswith(prefix.translate(_LOOKALIKES))]
        if len(matches) == 1:
            return matches[0]
        if matches:
            candidates = ", ".join(self._labelled(i) for i in matches[:5])
            suffix = f" and {len(matches) - 5} more" if len(matches) > 5 else ""
            raise UnknownJob(f"{ref!r} matches {len(matches)} jobs: {candidates}{suffix}")
        raise UnknownJob(f"no job {ref!r}{nearest(prefix, ids)} (`accel list` shows them)")

    def ids(self) -> list[str]:
        """Return the ids of all jobs, damaged ones too, newest first. Raises StoreError."""
        base = self._jobs
        return sorted(
            self._names(),
            key=lambda name: _order(_read(name, f"{base}/{name}")) if name.startswith(_TIMELESS) else name,
            reverse=True,
        )

    def _names(self) -> list[str]:
        try:
            names = os.listdir(self._jobs)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic_files.store_error(error, self._jobs, "read") from error
        return [name for name in names if _ID.match(name)]

    def records(self, ids: Iterable[str] | None = None) -> list[Record | CorruptRecord]:
        """Return all jobs, newest first, or those of `ids` (full ids) in their order; no other file is read.

        An unreadable job is `CorruptRecord` and hides no other; one that is gone is left out. Raises StoreError if
        the store itself cannot be read.
        """
        base = self._jobs
        jobs = (_read(job_id, f"{base}/{job_id}") for job_id in (self._names() if ids is None else ids))
        records = [record for record in jobs if record is not None]
        return records if ids is not None else sorted(records, key=_order, reverse=True)

    def prune(
        self,
        older_than_s: float | None = None,
        keep: int | None = None,
        ids: Iterable[str] | None = None,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[str]:
        """Delete finished jobs and return their ids, newest first. With `dry_run`, only return them.

        older_than_s: only jobs that ended longer ago.
        keep:         not the newest `keep` finished jobs; may be combined with older_than_s.
        ids:          only these (ids or prefixes), damaged ones included; one that is not over is a StoreError.
        force:        with `ids`, these regardless of their state.

        Otherwise never deletes a job that is not over, or that such a job waits for (`after`). Raises StoreError.
        """
        chosen = self.prunable(self.records(), older_than_s, keep, ids, force)
        return chosen if dry_run else self.delete(chosen)

    def prunable(
        self,
        all_records: Sequence[Record | CorruptRecord],
        older_than_s: float | None,
        keep: int | None,
        ids: Iterable[str] | None,
        force: bool,
    ) -> list[str]:
        """Return the ids that `prune` would delete of `all_records`, all jobs of the store."""
        if older_than_s is None and keep is None and ids is None:
            raise StoreError("nothing selected to prune: give older_than_s, keep or ids")
        records = [record for record in all_records if isinstance(record, Record)]
        known = {record.id for record in all_records}
        requested = None if ids is None else {ref if ref in known else self.resolve(ref) for ref in ids}
        if requested is not None and not force:
            _reject_live(records, requested)
        needed = {job_id for record in records if not record.status.state.final for job_id in record.after}
        finished = [r for r in records if r.status.state.final and r.id not in needed]
        cutoff = float("inf") if older_than_s is None else time.time() - older_than_s
        chosen = {r.id for r in finished[keep or 0 :] if (r.ended_at or r.created_at) < cutoff}
        if requested is not None:
            chosen = {r.id for r in all_records if force or r.id in chosen or isinstance(r, CorruptRecord)} & requested
        return sorted(chosen, reverse=True)

    def delete(self, ids: Iterable[str]) -> list[str]:
        """Delete these jobs (full ids) in any state. Return those that no other process has deleted meanwhile."""
        deleted = [job_id for job_id in ids if self._delete(job_id)]
        self._remove_leftovers()
        return deleted

    def _make_home(self) -> None:
        """Create the directory of jobs if it is missing. Raises StoreError, with the way to choose another."""
        try:
            os.makedirs(self._jobs, mode=0o700, exist_ok=True)
        except OSError as error:
            configured = os.environ.get("ACCEL_HOME", "").strip()
            home = f"ACCEL_HOME={configured}" if configured else f"the job store {self._home}"
            remedy = "choose another directory" if configured else "set ACCEL_HOME to another directory"
            raise StoreError(f"{home} cannot be created: {error.strerror}; {remedy}") from error

    def _publish(self, job_id: str, path: str, texts: Mapping[str, bytes]) -> None:
        """Create the directory under another name and rename it: a reader sees all of the job or nothing."""
        temporary = f"{self._jobs}/.new-{job_id}-{os.getpid()}-{os.urandom(3).hex()}"
        os.mkdir(temporary, 0o700)
        try:
            os.mkdir(f"{temporary}/logs", 0o700)
            for name, text in texts.items():
                atomic_files.create_file(f"{temporary}/{name}", text)
            atomic_files.sync_directory(temporary)
            os.rename(temporary, path)
        except BaseException:
            atomic_files.remove_tree(temporary)
            raise
        atomic_files.sync_directory(self._jobs)

    def _delete(self, job_id: str) -> bool:
        """Delete the job. Return False if another process has."""
        # Renamed first: a half deleted job must not look like a damaged one.
        grave = f"{self._jobs}/.old-{job_id}-{os.urandom(3).hex()}"
        try:
            os.rename(f"{self._jobs}/{job_id}", grave)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise atomic_files.store_error(error, f"{self._jobs}/{job_id}", "delete") from error
        atomic_files.remove_tree(grave)
        return True

    def _remove_leftovers(self) -> None:
        """Remove what processes that died in `_publish` or `_delete` left behind."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._jobs):
                is_leftover = entry.name.startswith((".new-", ".old-"))
                if is_leftover and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                    atomic_files.remove_tree(entry.path)

    def _labelled(self, job_id: str) -> str:
        record = _read(job_id, f"{self._jobs}/{job_id}")
        return f"{job_id} ({record.name})" if isinstance(record, Record) else job_id


def _read(job_id: str, path: str) -> Record | CorruptRecord | None:
    try:
        return read_record(job_id, path)
    except StoreError as error:
        # Pruned by another process since the directory was listed, or never a job.
        return CorruptRecord(id=job_id, path=path, reason=str(error)) if os.path.isdir(path) else None


def _order(job: Record | CorruptRecord | None) -> str:
    """Return the id; for an id without a time, as Helm charts create them, one with the job's creation time."""
    if isinstance(job, Record) and job.id.startswith(_TIMELESS):
        return _encode(max(0, int(job.created_at * 1000) - _EPOCH_MS) << _RANDOM_BITS)
    return job.id if job is not None else ""


def _reject_live(records: Iterable[Record], requested: set[str]) -> None:
    live = {record.id: record for record in records if not record.status.state.final}
    for job_id in sorted(requested & live.keys()):
        state = live[job_id].status.state.value
        raise StoreError(f"job {job_id} is {state}, not over: cancel it first (accel cancel {job_id})")
    dependents = {job_id: record.id for record in live.values() for job_id in record.after}
    for job_id in sorted(requested & dependents.keys()):
        raise StoreError(f"job {job_id} is still needed: {dependents[job_id]} runs after it")


def full_id(ref: str) -> str | None:
    """Return the id that `ref` spells; None if it is not a full one."""
    normalized = ref.lower().translate(_LOOKALIKES)
    return normalized if len(normalized) == _ID_LENGTH and set(normalized) <= set(_ALPHABET) else None


def created_at(job_id: str) -> float:
    """Return the submit time that the id holds, in seconds since the epoch, or now for an id without one."""
    if full_id(job_id) != job_id:
        return time.time()
    number = 0
    for char in job_id:
        number = number << 5 | _ALPHABET.index(char)
    return ((number >> _RANDOM_BITS) + _EPOCH_MS) / 1000


_last_number = 0
_number_lock = _thread.allocate_lock()


def _next_number() -> int:
    """Return time and random bits as a number that grows even if the clock stands still or goes back."""
    global _last_number
    with _number_lock:
        ms = max(0, time.time_ns() // 1_000_000 - _EPOCH_MS)
        random_part = int.from_bytes(os.urandom(2), "big") >> 1
        _last_number = max(ms << _RANDOM_BITS | random_part, _last_number + 1)
        return _last_number


def _encode(number: int) -> str:
    shifts = range(5 * (_ID_LENGTH - 1), -1, -5)
    return "".join(_ALPHABET[number >> shift & 31] for shift in shifts)
