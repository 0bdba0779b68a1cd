"""Crash-safe files with several writers: documents replaced by rename, lines appended under a lock.

Homes on clusters are NFS and Lustre, so only rename, append, fsync and a file lock are used. On a file system
without locks, an exclusively created file replaces the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..convert import parse_json
from ..errors import SpecError, StoreError, StoreNotWritable
from ..node.program import sync_directory as sync_directory
from ..processes import boot_id, has_ended, pid_namespace, pid_space, space_of

SCHEMA = 1

Migration = Callable[[dict[str, Any]], dict[str, Any]]

# File name -> schema -> the function that migrates a document to the next schema.
MIGRATIONS: dict[str, dict[int, Migration]] = {}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_LINE_START = '{"schema":'
# Ends a torn line so that it is no record, even where all but its newline had been written.
_VOID = b"~\n"
# A lock file's holder renews its time; without a renewal it is stale, if its process cannot be looked up here.
_RENEW_S, _FOREIGN_LOCK_STALE_S = 60.0, 600.0


def store_error(error: OSError, path: str, action: str) -> StoreError:
    """Return the one-line StoreError for an error of the operating system: StoreNotWritable for the action `write`."""
    text = f"cannot {action} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        text = f"disk full: cannot {action} {path} ({error.strerror}); free space or move ACCEL_HOME"
    elif error.errno in _FORBIDDEN:
        text = f"no permission to {action} {path} ({error.strerror})"
    elif error.errno == errno.ENOENT:
        return StoreError(f"cannot {action} {path}: not found (was the job pruned?)")
    return StoreNotWritable(text) if action == "write" else StoreError(text)


def migrate(document: object, path: str) -> dict[str, Any]:
    """Return the document in today's schema. Raises StoreError for one that is newer or has no schema."""
    if not isinstance(document, dict):
        raise StoreError(f"{path} is damaged: it is not a JSON object")
    schema = document.get("schema")
    if type(schema) is not int or schema < 0:
        raise StoreError(f"{path} is damaged: its schema is {schema!r}, not a number")
    if schema > SCHEMA:
        raise StoreError(f"{path} is from a newer accel (schema {schema}, not {SCHEMA}): upgrade accel to read it")
    steps = MIGRATIONS.get(os.path.basename(path), {})
    while schema < SCHEMA:
        if schema not in steps:
            raise StoreError(f"{path} has schema {schema}, which no version of accel has written")
        document, schema = steps[schema](document), schema + 1
    return document


def write_document(path: str, data: Mapping[str, Any]) -> None:
    """Replace the file atomically: a reader, or a crash, sees the old text or the new one, nothing between.

    Raises StoreError, and keeps the file, if it cannot be written or is damaged or newer than this program.
    """
    read_document(path)
    try:
        replace_file(path, encode({"schema": SCHEMA, **data}, path) + b"\n", durably=True)
    except OSError as error:
        raise store_error(error, path, "write") from error


def read_document(path: str) -> dict[str, Any] | None:
    """Return the data that `write_document` wrote, or None if there is no such file. Raises StoreError."""
    raw = read_bytes(path)
    if raw is None:
        return None
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    document = migrate(parsed, path)
    return {key: value for key, value in document.items() if key != "schema"}


def read_bytes(path: str) -> bytes | None:
    """Return the whole file, or None if there is none. Raises StoreError if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(error, path, "read") from error


def _read_all(fd: int) -> bytes:
    chunks = [os.read(fd, 65536)]
    while chunks[-1]:
        chunks.append(os.read(fd, 65536))
    return b"".join(chunks)


def encode(data: Mapping[str, Any], path: str) -> bytes:
    """Return one line of ASCII without its ending; lone surrogates survive. Raises SpecError for non-JSON data."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        name = os.path.basename(path)
        raise SpecError(f"{name} can hold only text, finite numbers, lists and mappings: {error}") from None


def create_file(path: str, data: bytes, *, durably: bool = True) -> None:
    """Create a file, which is on disk when this returns, if `durably`. Raises OSError, also if the file exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write(fd, data)
        if durably:
            os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes, *, durably: bool = False) -> None:
    """Replace a file atomically; if `durably`, it is on disk when this returns.

    Raises OSError; the file is then unchanged, unless only its directory could not be synced.
    """
    temporary = f"{os.path.dirname(path)}/.{os.path.basename(path)}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        create_file(temporary, data, durably=durably)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durably:
        sync_directory(os.path.dirname(path))


def _write(fd: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        count = os.write(fd, data[written:])
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count


def remove_tree(path: str) -> None:
    """Remove a directory as far as possible."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def parse_lines(raw: bytes, path: str) -> tuple[list[dict[str, Any]], bool]:
    """Return all complete records, and True if the file ends in a torn one, whose writer died.

    A record with `torn_before` was appended after a torn one: the text just before it is skipped. Raises
    StoreError, naming the line, for anything else that is not a record.
    """
    *lines, tail = raw.decode("ascii", "surrogateescape").split("\n")
    rows: list[dict[str, Any] | tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        row = _parse_line(line)
        if row is None:
            rows.append((number, line))
            continue
        if row.get("torn_before") is True and rows:
            rows.pop()
            while rows and isinstance(rows[-1], tuple):
                rows.pop()
        rows.append(row)
    torn = bool(tail)
    # The next writer died just after it had ended the torn line: the fragment now has a newline and no line after it.
    while rows and isinstance(rows[-1], tuple) and _is_fragment(rows[-1][1]):
        rows.pop()
        torn = True
    records: list[dict[str, Any]] = []
    for entry in rows:
        if isinstance(entry, tuple):
            raise StoreError(f"{path} is damaged: line {entry[0]} is not a record")
        records.append(migrate(entry, path))
    return records, torn


def _parse_line(line: str) -> dict[str, Any] | None:
    if not line.isascii():
        return None
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_fragment(line: str) -> bool:
    return line.isascii() and _LINE_START.startswith(line.rstrip("~")[: len(_LINE_START)])


def append_line(
    path: str, decide: Callable[[list[dict[str, Any]]], Mapping[str, Any] | None], *, durably: bool = True
) -> tuple[list[dict[str, Any]], bool]:
    """Call `decide` with all records and append the one that it returns, with no other writer in between.

    Returns the records that exist now, and True if one was appended. It is on disk when this returns; without
    `durably`, it is flushed by the system at some time, or with the next durable one. Raises StoreError if the
    file is damaged or newer, or cannot be written; it is then unchanged.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise store_error(error, path, "write") from error
    try:
        # The lock is on the file itself: taking it also makes an NFS client read what other hosts have appended.
        with locked(fd, path):
            raw = _read_all(fd)
            records, torn = parse_lines(raw, path)
            row = decide(records)
            if row is None:
                return records, False
            record = {"schema": SCHEMA, **row, **({"torn_before": True} if torn else {})}
            ending = _VOID if raw and not raw.endswith(b"\n") else b""
            _append(fd, len(raw), ending + encode(record, path) + b"\n", durably)
            return [*records, record], True
    except OSError as error:
        raise store_error(error, path, "write") from error
    finally:
        os.close(fd)


def _append(fd: int, size: int, data: bytes, durably: bool) -> None:
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if durably:
            os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
        raise


@contextlib.contextmanager
def locked(fd: int, path: str, *, blocking: bool = True) -> Iterator[bool]:
    """Hold the lock of the open file. Yields False if it is held elsewhere and `blocking` is off, else True.

    The lock of a process that dies is released.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        with locked_by_file(f"{path}.held", blocking=blocking) as acquired:
            yield acquired
        return
    try:
        yield True
    finally:
        # Not left to close(): a child forked meanwhile shares the open file and would keep the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def exclusive_lock(path: str, *, blocking: bool = True) -> Iterator[bool]:
    """Hold the lock of a file that serves as nothing else, as `locked` does. Raises StoreError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise store_error(error, path, "write") from error
    try:
        with locked(fd, path, blocking=blocking) as acquired:
            yield acquired
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_by_file(path: str, *, blocking: bool = True) -> Iterator[bool]:
    """Hold the same lock on a file system without locks: its holder is the process that created `path`.

    A thread renews the file's time, by the file server's clock, so that other hosts can tell a holder that has died.
    """
    import threading

    fields = (os.uname().nodename, str(os.getpid()), os.urandom(4).hex(), boot_id() or "-", pid_namespace() or "-")
    holder = " ".join(fields).encode()
    while not _create_lock(path, holder):
        if not blocking:
            yield False
            return
        time.sleep(0.005)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(_RENEW_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    threading.Thread(target=renew, daemon=True, name="accel-lock").start()
    try:
        yield True
    finally:
        released.set()
        with contextlib.suppress(OSError):
            os.unlink(path)


def _create_lock(path: str, holder: bytes) -> bool:
    temporary = f"{path}.{holder.split()[2].decode()}"
    create_file(temporary, holder)
    try:
        # A link, not O_EXCL: the file is there only with its holder's name in it, and NFS makes links exactly once.
        os.link(temporary, path)
        return True
    except FileExistsError:
        _break_if_stale(path, temporary)
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _break_if_stale(path: str, temporary: str) -> None:
    holder = _stale_holder(path, os.stat(temporary).st_mtime)
    if holder is None:
        return
    stale_path = f"{temporary}.aside"
    with contextlib.suppress(OSError):
        os.rename(path, stale_path)
        # Another process may have broken and acquired the lock before the rename: it then gets the lock back.
        if read_bytes(stale_path) != holder:
            os.link(stale_path, path)
        os.unlink(stale_path)


def _stale_holder(path: str, now: float) -> bytes | None:
    """Return the holder if it is stale. `now`: the file server's time."""
    holder = read_bytes(path)
    if not holder:
        return None
    host, pid, _, *rest = holder.decode("ascii", "replace").split(" ")  # older versions write only these
    boot, namespace = ("" if field == "-" else field for field in [*rest, "-", "-"][:2])
    space = space_of(boot, host, namespace)
    if space == pid_space():
        return holder if has_ended(int(pid), space) else None
    try:
        return holder if now - os.stat(path).st_mtime > _FOREIGN_LOCK_STALE_S else None
    except OSError:
        return None
