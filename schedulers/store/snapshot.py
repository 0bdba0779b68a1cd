"""Snapshots of code directories, `$ACCEL_HOME/snapshots/<digest>.tar`: pack, compress, unpack, delete unused ones."""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import hashlib
import os
import re
import shutil
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ..errors import SnapshotError, StoreError
from ..node import archive
from ..printable import one_line
from . import atomic_files
from .record import CorruptRecord, Record
from .source_files import Entry, list_all, list_code

_LARGE_BYTES = 100_000_000
_MAX_SHOWN = 5
_ATTEMPTS = 3
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A packed code directory.

    digest:   sha256 of every path, its permission bits and its content; equal digests are equal trees.
    warnings: one line each: what was left out, and what makes it large.
    """

    digest: str
    path: Path
    warnings: tuple[str, ...] = ()


class _ChangedError(Exception):
    """A file was written to while it was read."""


def pack(code: Path, home: Path) -> Snapshot:
    """Pack the code directory, unless the same tree is packed already, and log each warning once per process.

    The tree is what git tracks or would track in `code` (uncommitted work included), or, without git, everything
    that is not hidden; less what `.accelignore` names and untracked files that look like secrets. Links stay links,
    and permissions are kept. A directory that `unpack` has made, and nobody has changed, is the snapshot that it was
    made from.

    Raises SnapshotError, naming the path, for the home directory and `/`, a link that leads outside `code`, a file
    that cannot be read, files that keep changing, and a failed write.
    """
    top = os.path.realpath(code)
    if not os.path.isdir(top):
        raise SnapshotError(f"code directory not found: {top}")
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_ChangedError):
            packed = _pack(top, os.path.realpath(home))
            for warning in packed.warnings:
                _warn_once(top, warning)
            return packed
    raise SnapshotError(f"the files in {top} change while they are packed: try again when nothing writes to them")


@functools.cache
def _warn_once(top: str, warning: str) -> None:
    import logging

    logging.getLogger(__name__).warning("%s", one_line(warning))


def compress(tar: Path) -> Path:
    """Compress a snapshot next to itself, once, to the same bytes for the same snapshot. Raises StoreError."""
    path = tar.with_name(f"{tar.name}.gz")
    if path.exists():
        return path
    partial = f"{path}.{os.getpid()}"
    try:
        with (
            open(tar, "rb") as source,
            open(partial, "wb") as out,
            gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0, compresslevel=6) as file,
        ):
            shutil.copyfileobj(source, file, _CHUNK)
        os.replace(partial, path)
    except OSError as error:
        raise atomic_files.store_error(error, str(path), "write") from error
    return path


def unpack(snapshot: Path, destination: Path, *, max_files: int | None = None) -> None:
    """Unpack a snapshot into the directory `destination`, which appears only complete and with the right digest.

    Does nothing if the same snapshot was unpacked there before. Raises SnapshotError if `destination` is
    something else, or if the snapshot is damaged, would write outside it, or has more than `max_files` entries.
    """
    digest = Path(snapshot).name.removesuffix(".tar")
    parent, name = os.path.split(os.path.abspath(destination))
    marker = _marker(destination)
    if os.path.lexists(destination):
        if atomic_files.read_bytes(marker) == digest.encode():
            return
        raise SnapshotError(f"cannot unpack into {destination}: it exists and is not this snapshot")
    temporary = os.path.join(parent, f".{name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        try:
            os.makedirs(temporary, mode=0o700)
            _extract(snapshot, temporary, digest, max_files)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(marker)
            atomic_files.create_file(marker, digest.encode())
            os.rename(temporary, destination)
        except BaseException:
            atomic_files.remove_tree(temporary)
            raise
    except OSError as error:
        raise SnapshotError(str(atomic_files.store_error(error, str(destination), "unpack"))) from error


def _marker(destination: str | os.PathLike[str]) -> str:
    """Return the path of the file that holds the digest of the snapshot that was unpacked into `destination`."""
    parent, name = os.path.split(os.path.abspath(destination))
    return os.path.join(parent, f".{name}.snapshot")


def _touch_existing(path: str) -> bool:
    """Return True if the snapshot exists; it then counts as packed now."""
    if not os.path.exists(path):
        return False
    with _lock(os.path.dirname(path)):
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
    return True


def _lock(directory: str) -> contextlib.AbstractContextManager[bool]:
    """Return the lock for reusing a snapshot in `directory`, or judging its age and deleting it. Raises StoreError."""
    return atomic_files.exclusive_lock(os.path.join(directory, ".lock"))


def _pack(top: str, home: str) -> Snapshot:
    entries, warnings, hashes, digest = _read_unpacked(top) or _read_code(top, home)
    directory = os.path.join(home, "snapshots")
    path = os.path.join(directory, f"{digest}.tar")
    try:
        if not _touch_existing(path):
            _write(top, entries, hashes, directory, path)
    except OSError as error:
        raise SnapshotError(str(atomic_files.store_error(error, path, "write"))) from error
    except StoreError as error:
        raise SnapshotError(str(error)) from error
    return Snapshot(
        digest=digest,
        path=Path(path),
        warnings=(*warnings, *_size_warning(top, entries)),
    )


_Tree = tuple[list[Entry], list[str], list[bytes], str]  # entries, warnings, hashes of the contents, digest


def _read_code(top: str, home: str) -> _Tree:
    entries, warnings = list_code(top, home)
    hashes = [_content_hash(top, entry) for entry in entries]
    return entries, warnings, hashes, _digest(zip(entries, hashes, strict=True))


def _read_unpacked(top: str) -> _Tree | None:
    """Return the whole tree if `unpack` has made it and it has still the same content.

    Without this, files that git tracked where the snapshot was packed, such as hidden ones, would be left out.
    """
    digest = atomic_files.read_bytes(_marker(top))
    if digest is None:
        return None
    entries = list_all(top)
    hashes = [_content_hash(top, entry) for entry in entries]
    is_same = _digest(zip(entries, hashes, strict=True)).encode() == digest
    return (entries, [], hashes, digest.decode()) if is_same else None


def _digest(entries: Iterable[tuple[Entry, bytes]]) -> str:
    tree = hashlib.sha256()
    for entry, content in sorted(entries, key=lambda pair: os.fsencode(pair[0].path)):
        tree.update(f"{entry.type} {entry.mode:o} ".encode() + os.fsencode(entry.path) + b"\0" + content)
    return tree.hexdigest()


def _content_hash(top: str, entry: Entry) -> bytes:
    if entry.type != "file":
        return hashlib.sha256(os.fsencode(entry.link)).digest()
    with _open(top, entry) as file:
        content = _Hashing(file)
        for start in range(0, entry.size, _CHUNK):
            content.read(min(_CHUNK, entry.size - start))
    return content.digest()


def _open(top: str, entry: Entry) -> IO[bytes]:
    full_path = os.path.join(top, entry.path)
    try:
        fd = os.open(full_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _ChangedError
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            raise _ChangedError from None
        raise SnapshotError(f"cannot read {full_path!r}: {error.strerror}") from error
    return open(fd, "rb")


def _write(top: str, entries: list[Entry], hashes: list[bytes], directory: str, path: str) -> None:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            _write_tar(file, top, entries, hashes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        atomic_files.sync_directory(directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write_tar(out: IO[bytes], top: str, entries: list[Entry], hashes: list[bytes]) -> None:
    """Write the same bytes for the same tree: sorted, and without times and owners."""
    # GNU's format has names as plain bytes, whatever they are.
    with tarfile.open(
        fileobj=out, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for entry, expected in zip(entries, hashes, strict=True):
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.type == "file":
                info.size = entry.size
                with _open(top, entry) as file:
                    content = _Hashing(file)
                    tar.addfile(info, content)  # type: ignore[arg-type]  # all that it calls is read()
                if content.digest() != expected:
                    raise _ChangedError
            else:
                info.type = tarfile.SYMTYPE if entry.type == "link" else tarfile.DIRTYPE
                info.linkname = entry.link
                tar.addfile(info)


class _Hashing:
    """A file that hashes what is read from it, up to the listed size: a log may grow meanwhile, but must not shrink."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise _ChangedError
        self._hash.update(data)
        return data

    def digest(self) -> bytes:
        return self._hash.digest()


def _extract(snapshot: Path, top: str, digest: str, max_files: int | None) -> None:
    problem = f"the snapshot {snapshot} is damaged; delete it and submit again"
    try:
        with tarfile.open(snapshot, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            max_bytes = os.path.getsize(snapshot)
            if _digest(_member(tar, info) for info in archive.members(tar, max_bytes, max_files)) != digest:
                raise SnapshotError(f"{problem} (its content has another digest)")
            archive.extract(tar, top, modes=0o777, max_bytes=max_bytes, max_files=max_files)
    except FileNotFoundError:
        raise SnapshotError(f"snapshot not found: {snapshot}") from None
    except tarfile.ExtractError as error:
        raise SnapshotError(f"the snapshot {snapshot} cannot be unpacked: {error}") from None
    except (tarfile.TarError, EOFError) as error:
        raise SnapshotError(f"{problem} ({error})") from None


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> tuple[Entry, bytes]:
    """Return the entry that `pack` made a member of, and the hash of its content. Raises tarfile.ExtractError."""
    if os.path.normpath(info.name) != info.name:
        raise tarfile.ExtractError(f"{info.name!r} is not a name that is packed")
    kind: Literal["link", "directory", "file"] = "link" if info.issym() else "directory" if info.isdir() else "file"
    content = hashlib.sha256(os.fsencode(info.linkname))
    source = tar.extractfile(info) if kind == "file" else None
    while source is not None and (chunk := source.read(_CHUNK)):
        content.update(chunk)
    return Entry(info.name, kind, info.mode & 0o777, info.size, info.linkname), content.digest()


def _size_warning(top: str, entries: list[Entry]) -> list[str]:
    total = sum(entry.size for entry in entries)
    if total < _LARGE_BYTES:
        return []
    largest = sorted(entries, key=lambda entry: (-entry.size, entry.path))[:_MAX_SHOWN]
    shown = ", ".join(f"{entry.path!r} ({_megabytes(entry.size)})" for entry in largest)
    return [f"the code directory {top} has {_megabytes(total)}, which every job would copy; the largest: {shown}"]


def _megabytes(size: int) -> str:
    return f"{size / 1_000_000:.0f} MB"


# Deletion of snapshots that no job uses any more.

_MIN_AGE_S = 86400.0
_CLOCK_SKEW_S = 3600.0
# A snapshot, its compressed copy for a target, or a partial file of either that a killed process left.
_FILE = re.compile(r"[0-9a-f]{64}\.tar(\.gz)?(\.[0-9a-f.]+)?\Z")


def prune_snapshots(home: Path, jobs: Iterable[Record | CorruptRecord], *, dry_run: bool = False) -> list[str]:
    """Delete the snapshots in `home` that none of `jobs`, all jobs there, uses, and return their digests.

    A snapshot is kept for a day, while a job names it, over or not, and while a job that is not over may use it:
    if it was packed, or found packed, after the first such job was submitted. This is safe during submits,
    whether or not they are in `jobs` yet. Raises StoreError if a job or a snapshot cannot be read or deleted.
    """
    directory = os.path.join(home, "snapshots")
    jobs = list(jobs)
    try:
        used_names, cutoff = {_snapshot_of(job.path) for job in jobs}, min(_limits(jobs))
        names = [name for name in sorted(os.listdir(directory)) if _FILE.match(name) and name not in used_names]
        old = [name for name in names if _is_old(os.path.join(directory, name), cutoff)]
        deleted = old if dry_run else [name for name in old if _delete(directory, name, cutoff)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise atomic_files.store_error(error, directory, "clear") from error
    return [name.removesuffix(".tar") for name in deleted if name.endswith(".tar")]


def _snapshot_of(job: str) -> str | None:
    """Return the name of the snapshot that the local job in this directory runs, or ran, a copy of."""
    path = atomic_files.read_bytes(os.path.join(job, "local", "snapshot"))
    return None if path is None else os.path.basename(os.fsdecode(path))


def _limits(jobs: Iterable[Record | CorruptRecord]) -> Iterator[float]:
    """Yield times; a snapshot packed before all of them is unused."""
    yield time.time() - _MIN_AGE_S
    for job in jobs:
        if not isinstance(job, Record):
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(job.path, "plan.json")).st_mtime - _CLOCK_SKEW_S
        elif not job.status.state.final:
            # The times of jobs are from this machine's clock, those of files perhaps from a server's.
            yield job.created_at - _CLOCK_SKEW_S


def _is_old(path: str, cutoff: float) -> bool:
    """Return True if the snapshot exists and was packed, or last found packed, before that time."""
    try:
        return os.stat(path).st_mtime < cutoff
    except FileNotFoundError:
        return False


def _delete(directory: str, name: str, cutoff: float) -> bool:
    """Delete the snapshot, unless a submit has reused it; return True if deleted."""
    path = os.path.join(directory, name)
    with _lock(directory):
        old = _is_old(path, cutoff)
        if old:
            os.unlink(path)
    return old
