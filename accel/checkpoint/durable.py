"""Files that are on the disk when they are closed, with their checksum taken on the way.

What is written goes through two buffers of half a MiB past the system's page cache (``O_DIRECT``, where the file system
has it): a checkpoint neither pushes the data set out of memory nor waits for all of it to be flushed at the end, and
writing costs the same little memory whatever its size.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

_BUFFER = 1 << 19
_BUFFERS = 2
_WRITERS = 1
BLOCK = 16 << 20  # a multiple of _BUFFER
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Digest:
    """Length of a file in bytes, and the CRC-32 of each of its blocks of 16 MiB, eight hexadecimal digits a block."""

    length: int
    crc32: str


class _Checksum:
    """The checksums of the blocks of what is fed in, in pieces that do not cross a block's end."""

    def __init__(self) -> None:
        self._length = 0
        self._running = 0
        self._blocks: list[str] = []

    def feed(self, piece: memoryview) -> None:
        self._running = zlib.crc32(piece, self._running)
        self._length += len(piece)
        if self._length % BLOCK == 0 and len(piece):
            self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(f"{self._running:08x}")
        self._running = 0

    def digest(self) -> Digest:
        if self._length % BLOCK:
            self._end_block()
        return Digest(self._length, "".join(self._blocks))


class _Disk:
    """Threads that write full buffers of one file while the next is filled.

    Not `concurrent.futures`, which takes no more work once the interpreter is ending: a save that goes on beside
    training must be able to finish then.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._work: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._error: OSError | None = None
        self._threads = [threading.Thread(target=self._run, name="accel-disk") for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def write(self, buffer: memoryview, offset: int) -> None:
        """Have ``buffer`` written at ``offset``; `free_buffer` returns it when that is done."""
        self._work.put((buffer, offset))

    def free_buffer(self) -> memoryview:
        """A buffer that has been written, waiting for it. Raises what the disk said to any of them."""
        buffer = self._free.get()
        if self._error is not None:
            raise self._error
        return buffer

    def close(self) -> None:
        """Return when all is written; never raises: see `check`."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise what the disk said, if it said something."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                if self._error is None:
                    _write_at(self._file, *job)
            except OSError as error:
                self._error = error
            self._free.put(job[0])


class DurableFile:
    """A new file that is written from start to end.

    Has what `torch.save` asks of a file. When the ``with`` block is left without an error everything is on the disk,
    and `digest` stands. Raises `FileExistsError` for a file that is there, and `OSError` for what the disk says, in the
    place of what a writer in the block makes of that.
    """

    digest: Digest

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._checksum = _Checksum()
        self._disk: _Disk | None = None
        self._buffers: list[mmap] = []
        self._buffer: memoryview | None = None
        self._filled = 0
        self._offset = 0

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._disk is not None:
                self._disk.close()
            if kind is None:
                self._finish()
            elif self._disk is not None and issubclass(kind, Exception):
                self._disk.check()
        except OSError as failed:
            failed.filename = self._path
            raise
        finally:
            os.close(self._file)
            self._buffer, self._disk = None, None
            self._buffers.clear()

    def write(self, data: bytes | memoryview) -> int:
        """Take ``data``, which may be changed again when this returns."""
        source = memoryview(data).cast("B")
        done, length = 0, len(source)
        while done < length:
            buffer = self._buffer or self._next_buffer()
            taken = min(length - done, _BUFFER - self._filled)
            buffer[self._filled : self._filled + taken] = source[done : done + taken]
            self._filled += taken
            done += taken
            if self._filled == _BUFFER:
                self._send(buffer)
        return length

    def flush(self) -> None:
        """Nothing: all is on the disk at the end."""

    def _next_buffer(self) -> memoryview:
        if self._disk is not None and len(self._buffers) == _BUFFERS:
            self._buffer = self._disk.free_buffer()
        else:
            self._buffers.append(mmap(-1, _BUFFER))  # pages of its own, as O_DIRECT wants
            self._buffer = memoryview(self._buffers[-1])
        return self._buffer

    def _send(self, buffer: memoryview) -> None:
        if self._disk is None:
            _set_direct(self._file, True)
            self._disk = _Disk(self._file)
        self._checksum.feed(buffer)
        self._disk.write(buffer, self._offset)
        self._offset += _BUFFER
        self._filled = 0
        self._buffer = None

    def _finish(self) -> None:
        if self._disk is not None:
            self._disk.check()
        if self._buffer is not None:
            _set_direct(self._file, False)  # it takes whole sectors only
            rest = self._buffer[: self._filled]
            self._checksum.feed(rest)
            _write_at(self._file, rest, self._offset)
        os.fsync(self._file)
        self.digest = self._checksum.digest()


def _set_direct(file: int, direct: bool) -> None:
    if not _DIRECT:
        return
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system goes through the page cache
            raise


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            written = os.pwrite(file, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            _set_direct(file, False)  # larger sectors than our buffers are aligned to
            written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def write_durably(path: Path, fill: Callable[[DurableFile], Any]) -> Digest:
    """Make the file ``path`` of what ``fill`` writes; it is on the disk when this returns."""
    with DurableFile(path) as file:
        fill(file)
    return file.digest


def digest_of(path: Path) -> Digest:
    """Read a file and return its digest."""
    checksum = _Checksum()
    buffer = memoryview(bytearray(_BUFFER))
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        filled = 0
        while got := file.readinto(buffer[filled:]):
            filled += got
            if filled == _BUFFER:
                checksum.feed(buffer)
                filled = 0
        checksum.feed(buffer[:filled])
    return checksum.digest()


def block_checksum(path: Path, number: int) -> str:
    """The checksum, in a `Digest`, of block ``number`` of a file; that of nothing behind its end."""
    checksum = 0
    place, end = number * BLOCK, (number + 1) * BLOCK
    buffer = memoryview(bytearray(_BUFFER))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, place, BLOCK, os.POSIX_FADV_SEQUENTIAL)
        while place < end and (got := os.preadv(file, [buffer[: end - place]], place)):
            checksum = zlib.crc32(buffer[:got], checksum)
            place += got
    finally:
        os.close(file)
    return f"{checksum:08x}"


def settle(path: Path) -> Digest:
    """Push a file that something else has written to the disk, and return its digest."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return digest_of(path)


def fsync_directory(path: Path) -> None:
    """Push the entries of a directory to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
