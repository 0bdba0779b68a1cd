"""Report a full disk as such, whichever writer met it.

torch drops the system's error number when a write of its archive fails, and safetensors puts it into its text.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel.checkpoint.directory import newest_whole
from accel.errors import CheckpointError

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_NUMBER = re.compile(r"\b(?:os error|code:) (\d+)")  # in the texts of several versions of safetensors
_ANONYMOUS = ("inline_container", "PytorchStreamWriter", "SafetensorError")
_PROBE = 1 << 20


@contextmanager
def reporting_full_disk(place: Path, *, checkpoint: bool = False) -> Iterator[None]:
    """In the block, raise `CheckpointError` for what fails because the disk of ``place`` is full.

    The message has the room left; with ``checkpoint`` also the last whole checkpoint beside ``place``, or itself.
    """
    try:
        yield
    except Exception as error:
        folder = _existing(place)
        number = _number(error, folder)
        if number is None:
            raise
        room = f"{shutil.disk_usage(folder).free // 10**6} MB left on {_mount_point(folder)}"
        last = f"; {_last(place)}" if checkpoint else ""
        raise CheckpointError(f"{_FULL[number]} ({room}){last}") from error


def _number(error: BaseException, folder: Path) -> int | None:
    """The error number of a full disk that ``error`` comes from, or ``None`` if it comes from something else."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    text = f"{type(error).__name__}: {error}"
    named = _NUMBER.search(text)
    if named is not None:
        return int(named[1]) if int(named[1]) in _FULL else None
    return _probe(folder) if any(word in text for word in _ANONYMOUS) else None


def _probe(folder: Path) -> int | None:
    """Write a small file; return the error number if the disk is too full for it."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in _FULL else None
    return None


def _existing(place: Path) -> Path:
    return next(folder for folder in (place, *place.resolve().parents) if folder.is_dir())


def _mount_point(folder: Path) -> Path:
    return next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.is_mount())


def _last(place: Path) -> str:
    newest = newest_whole(place.parent)
    return (
        f"there is no whole checkpoint in {place.parent}"
        if newest is None
        else f"the last whole checkpoint is {newest}"
    )
