"""The protocol of the programs that run on hosts (a line of JSON in, a line of JSON out), and their file helpers."""

from __future__ import annotations

import errno
import json
import os
import sys

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Request = dict[str, Any]


class InvalidRequest(Exception):
    """An error with one line for people."""


def answer(respond: Callable[[str, Request], Any]) -> Any:
    """Read a request; return what `respond(root, request)` returns, or `{"error": …}`."""
    try:
        request = json.loads(sys.stdin.buffer.readline())
        return respond(os.path.expanduser(request["root"]), request)
    except InvalidRequest as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": describe_error(error)}


def write_reply(line: object, contents: Sequence[bytes] = ()) -> None:
    """Write the reply, and the bytes that belong to it."""
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    for data in contents:
        sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def describe_error(error: OSError) -> str:
    path = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing_path = path if isinstance(path, str) and os.path.exists(path) else os.path.dirname(str(path)) or "."
        free = free_bytes(existing_path) // 1_000_000 if os.path.exists(existing_path) else 0
        return f"disk full: cannot write {path} ({free} MB free; quota?)"
    return f"{path}: {(error.strerror or str(error)).lower()}"


def free_bytes(path: str) -> int:
    """Return the free bytes for this user on the disk of an existing path."""
    fs_stats = os.statvfs(path)
    return fs_stats.f_bavail * fs_stats.f_frsize


def check_free_space(root: str, size: int, path: str) -> None:
    """Raise InvalidRequest for a file that does not fit, before it is sent."""
    free = free_bytes(root)
    if free < size:
        need, available = (f"{count / 1_000_000:.1f} MB" for count in (size, free))
        raise InvalidRequest(f"disk full: {path} needs {need}, but {available} are free")


def partial_path(path: str) -> str:
    """Return a new path next to this one, for content that is renamed once it is complete."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.part")


def write_all(fd: int, data: bytes, path: str) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            error.filename = path
            raise


def sync_directory(path: str) -> None:
    """Make a rename in `path` durable. File systems that cannot sync a directory do not need it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)
