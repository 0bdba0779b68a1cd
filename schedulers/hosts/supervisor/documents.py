"""JSON files that are whole whenever they are read, and are written on a full disk too: their space is taken before."""

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
    """A JSON file that is replaced in one step: a reader sees the old or the new, or that there is none yet.

    What is written next has its place beside it (`.next`). Raises OSError where nothing can be written.
    """

    def __init__(self, path: str, size: int) -> None:
        """`size` is for how many bytes there is to be room on the disk, whatever fills it later."""
        self.path = path
        self._next = f"{path}.next"
        self._size = size
        self._preallocate()

    def write(self, document: dict[str, Any]) -> None:
        """Blanks at the end make up for what is shorter than before: blocks that are given up are not had again."""
        self._put(document, padded=True)
        if not _exchange(self._next, self.path):
            os.replace(self._next, self.path)
            self._preallocate()

    def write_once(self, document: dict[str, Any]) -> None:
        """For how a job ended: what is there stays; what is written is on the disk when this returns."""
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
            _write_all(fd, data.ljust(self._size) if padded else data)
            if not padded:
                os.ftruncate(fd, len(data))
                os.fsync(fd)
        finally:
            os.close(fd)

    def _preallocate(self) -> None:
        with contextlib.suppress(OSError):  # it may be there when it is needed
            self._put({}, padded=True)


def preallocate(path: str, size: int = RESERVED_BYTES) -> None:
    """Lets so many bytes be appended to a file whatever fills the disk meanwhile, where its file system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end = ctypes.c_int64(os.fstat(fd).st_size)
            _LIBC.fallocate(fd, _FALLOC_FL_KEEP_SIZE, end, ctypes.c_int64(size))
        finally:
            os.close(fd)


def log(text: str) -> None:
    """Into the supervisor's log; a full disk loses it."""
    with contextlib.suppress(OSError):
        os.write(2, text.rstrip("\n").encode(errors="replace") + b"\n")


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _exchange(path: str, other: str) -> bool:
    """Swaps two files' names. False where there is no other yet, or the system cannot do that."""
    try:
        failed = _LIBC.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    except AttributeError:  # an old C library
        return False
    return not failed
