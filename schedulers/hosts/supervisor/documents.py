"""JSON files that readers always see complete, and whose space is reserved, so that a full disk takes them, too."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1
RESERVED_BYTES = 1 << 16
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FALLOC_FL_KEEP_SIZE = 1
_LIBC = ctypes.CDLL(None)


class AtomicJsonFile:
    """A JSON file that is replaced atomically: a reader sees the old content, the new one or, at first, no file.

    The next content is prepared in PATH.next. Raises OSError if it cannot be written.
    """

    def __init__(self, path: str, size: int) -> None:
        """Reserve `size` bytes on the disk for the content."""
        self.path = path
        self._next = f"{path}.next"
        self._size = size
        self._preallocate()

    def write(self, document: dict[str, Any]) -> None:
        """Replace the content, padded with blanks to the reserved size: freed blocks may not be available again."""
        self._put(document, padded=True)
        if not _exchange(self._next, self.path):
            os.replace(self._next, self.path)
            self._preallocate()

    def write_once(self, document: dict[str, Any]) -> None:
        """Write a job's final result, unless there is one. It is on the disk when this returns."""
        if not os.path.exists(self.path):
            self._put(document, padded=False)
            os.replace(self._next, self.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._next)

    def _put(self, document: dict[str, Any], *, padded: bool) -> None:
        data = json.dumps(document).encode() + b"\n"
        self._size = max(self._size, len(data))
        fd = os.open(self._next, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            remaining = data.ljust(self._size) if padded else data
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            if not padded:
                os.ftruncate(fd, len(data))
                os.fsync(fd)
        finally:
            os.close(fd)

    def _preallocate(self) -> None:
        with contextlib.suppress(OSError):  # space may be available when it is needed
            self._put({}, padded=True)


def preallocate(path: str, size: int = RESERVED_BYTES) -> None:
    """Reserve space to append `size` bytes to a file, if its file system supports that."""
    with contextlib.suppress(OSError, AttributeError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = ctypes.c_int64(os.fstat(fd).st_size)
            _LIBC.fallocate(fd, _FALLOC_FL_KEEP_SIZE, end, ctypes.c_int64(size))
        finally:
            os.close(fd)


def job_status(
    state: str, reason: str, message: str, *, exit_code: int | None = None, attempt: int = 0, fenced: bool = False
) -> dict[str, Any]:
    """Return a job's final status, as in exit.json."""
    return {
        "state": state,
        "reason": reason,
        "exit_code": exit_code,
        "attempt": attempt,
        "message": message,
        "native_state": "",
        "failure": None,
        "fenced": fenced,
    }


def log(text: str) -> None:
    """Write to the supervisor's log; a full disk loses the text."""
    with contextlib.suppress(OSError):
        os.write(2, text.rstrip("\n").encode(errors="replace") + b"\n")


def _exchange(path: str, other: str) -> bool:
    """Swap two files' names. Return False if one is missing, or the system cannot."""
    try:
        failed = _LIBC.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    except AttributeError:  # an old C library
        return False
    return not failed
