"""Detection of a full disk in any writer's error: torch drops the error number, safetensors the exception type."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.errors import AccelError, CheckpointError

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_LITTLE = 1 << 20


@contextmanager
def reporting_full_disk(place: Path, more: str = "") -> Iterator[None]:
    """Raise `CheckpointError` with the free space and ``more`` if the block fails because the disk is full.

    The disk is that of the file that the error names, otherwise that of ``place``.
    """
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        failed = _system_error(error)
        name = failed.filename if failed is not None else None
        folder = _existing(Path(name) if isinstance(name, str) else place)
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        number = failed.errno if failed is not None else _number_without(error, free)
        if number not in _FULL:
            raise
        no_inodes = number == errno.ENOSPC and disk.f_files and not disk.f_favail
        problem = "the disk has no inodes left" if no_inodes else _FULL[number]
        mount = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.is_mount())
        room = f"{free // 10**6} MB left on {mount}"
        raise CheckpointError(f"{problem} ({room}){more}") from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk that caused ``error``, if any."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__ or error.__context__
    return error


def _number_without(error: BaseException, free: int) -> int | None:
    """Return the number of a full disk for an error without one, judged by its text or by the ``free`` bytes."""
    if isinstance(error, OSError):
        return None
    named = (number for number in _FULL if os.strerror(number) in str(error))
    return next(named, errno.ENOSPC if free < _LITTLE else None)


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.resolve().parents) if folder.is_dir())
