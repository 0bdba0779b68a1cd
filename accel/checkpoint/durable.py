"""Files that are on the disk when they are closed, with checksums, and the report of a full disk.

Data goes through three buffers of a MiB and bypasses the page cache (``O_DIRECT``, where the file system
has it): a checkpoint neither evicts the data set from memory nor waits for one large flush at the end, and
writing needs the same little memory for any size.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from accel.errors import AccelError, CheckpointError
from accel.host_memory import HostMemory

try:
    from zlib_ng.zlib_ng import crc32  # five times as fast
except ImportError:  # it has no wheel for this machine, or accel was installed without the extra
    from zlib import crc32

_BUFFER = 1 << 20
_BUFFERS = 3
BLOCK = 16 << 20  # a multiple of _BUFFER
_CPU = torch.device("cpu")
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Digest:
    """The length of a file in bytes, and the CRC-32 of each block of 16 MiB as eight hexadecimal digits."""

    length: int
    crc32: str


class DurableFile:
    """A new file that is written from start to end, also by `torch.save`, with tensors on ``device``.

    After `close` everything is on the disk. Raises `FileExistsError` if the file exists.
    """

    def __init__(self, path: Path, device: torch.device = _CPU) -> None:
        self._path = str(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._checksums: list[int] = []  # of the blocks
        self._memory = HostMemory(_BUFFERS * _BUFFER, device)  # aligned to pages: O_DIRECT
        self._offset = self._filled = 0
        # One buffer is filled while a thread writes another. `concurrent.futures` would not do: it accepts no work
        # once the interpreter is exiting, when a background save must still finish.
        self._full: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for buffer in torch.split(self._memory.bytes, _BUFFER):
            self._free.put(buffer.numpy().data)
        self._buffer = self._free.get()
        self._error: OSError | None = None  # the first of the thread
        self._thread = threading.Thread(target=self._write_buffers, name="accel-disk")
        self._thread.start()

    def close(self) -> Digest:
        """Flush everything to the disk. Raises the `OSError` of any write that failed, with the file's name."""
        try:
            if self._filled:
                self._send()
            self._full.put(None)
            self._thread.join()
            if self._error is not None:
                raise self._error
            os.fsync(self._file)
            return Digest(self._offset, "".join(f"{checksum:08x}" for checksum in self._checksums))
        except OSError as error:
            error.filename = self._path
            raise
        finally:
            os.close(self._file)
            del self._buffer
            self._memory.free()

    def write(self, data: bytes | memoryview) -> int:
        """Copy ``data`` to a buffer; the caller may change it when this returns."""
        source = memoryview(data).cast("B")
        for buffer, start in self._parts(len(source)):
            buffer[:] = source[start : start + len(buffer)]
        return len(source)

    def write_tensor(self, flat: torch.Tensor) -> None:
        """Do as `write` with the bytes of the one-dimensional tensor ``flat``, which may be on a device."""
        source = flat.view(torch.uint8)
        for buffer, start in self._parts(source.numel()):
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(source[start : start + len(buffer)])

    def _parts(self, length: int) -> Iterator[tuple[memoryview, int]]:
        """Yield the parts of buffers for the next ``length`` bytes, and where each begins in these bytes."""
        written = 0
        while written < length:
            count = min(length - written, _BUFFER - self._filled)
            part = self._buffer[self._filled : self._filled + count], written
            self._filled += count
            written += count
            yield part
            if self._filled == _BUFFER:
                self._send()
                self._buffer = self._free.get()
                if self._error is not None:
                    raise self._error

    def flush(self) -> None:
        """Do nothing: everything is on the disk at the end."""

    def _send(self) -> None:
        """Have the thread write what the buffer holds."""
        part = self._buffer[: self._filled]
        if self._offset % BLOCK == 0:
            self._checksums.append(0)
        self._checksums[-1] = crc32(part, self._checksums[-1])
        self._full.put((part, self._offset))
        self._offset += self._filled
        self._filled = 0

    def _write_buffers(self) -> None:
        while (job := self._full.get()) is not None:
            try:
                if self._error is None:
                    _write_at(self._file, *job)
            except OSError as error:
                self._error = error
            self._free.put(job[0])


def _write_at(file: int, data: memoryview, offset: int) -> None:
    direct = _DIRECT if len(data) == _BUFFER else 0  # O_DIRECT writes complete sectors only
    while data:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, direct)
            written = os.pwrite(file, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = 0  # the file system has none, or the sectors are larger than the buffers' alignment
        else:
            data, offset = data[written:], offset + written


def write_durably(path: Path, fill: Callable[[DurableFile], Any], device: torch.device = _CPU) -> Digest:
    """Write the file ``path`` by ``fill``, flush it to the disk, and return its digest; see `DurableFile`.

    A write error of the system is raised in place of what ``fill`` made of it.
    """
    file = DurableFile(path, device)
    try:
        fill(file)
    finally:
        digest = file.close()
    return digest


def digest_of(path: Path) -> Digest:
    """Read a file and return its digest."""
    length = path.stat().st_size
    return Digest(length, "".join(block_checksum(path, number) for number in range(-(-length // BLOCK))))


def block_checksum(path: Path, number: int) -> str:
    """Return the checksum of block ``number`` of a file, as in `Digest`; beyond the end, that of empty data."""
    checksum, rest = 0, BLOCK
    buffer = memoryview(bytearray(_BUFFER))
    with path.open("rb", buffering=0) as file:
        file.seek(number * BLOCK)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), file.tell(), BLOCK, os.POSIX_FADV_SEQUENTIAL)
        while rest and (count := file.readinto(buffer[:rest])):
            checksum = crc32(buffer[:count], checksum)
            rest -= count
    return f"{checksum:08x}"


def fsync(path: Path) -> None:
    """Flush an existing file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The report of a full disk.

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


@contextmanager
def reporting_full_disk(hint: str = "") -> Iterator[None]:
    """Raise `CheckpointError` with the file, the free space and ``hint`` if the block fails because the disk is full.

    Only the number of the system's error says so: torch and safetensors drop it in writers of their own.
    """
    try:
        yield
    except Exception as error:
        system_error: BaseException | None = error
        while system_error is not None and not (isinstance(system_error, OSError) and system_error.errno in _FULL):
            system_error = system_error.__cause__ or system_error.__context__
        if system_error is None or isinstance(error, AccelError):
            raise
        raise CheckpointError(f"{_full_disk(system_error)}{hint}") from error


def _full_disk(error: OSError) -> str:
    problem = _FULL[error.errno or 0]
    if not isinstance(error.filename, str):
        return problem
    folder = next(folder for folder in Path(error.filename).resolve().parents if folder.is_dir())
    disk = os.statvfs(folder)
    if error.errno == errno.ENOSPC and disk.f_files and not disk.f_favail:
        problem = "the disk has no inodes left"
    mount = next(parent for parent in (folder, *folder.parents) if parent.is_mount())
    return f"{problem} ({disk.f_bavail * disk.f_frsize // 10**6} MB left on {mount}): {error.filename}"
