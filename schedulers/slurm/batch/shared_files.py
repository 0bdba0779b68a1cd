"""Files in a job's directory on the shared file system. Each is complete whenever it is read.

slurm/settings.json    the settings
slurm/secrets.json     values for the ranks' environment, removed when the job cannot be restarted
slurm/attempts.jsonl   a line for each start of the batch script
slurm/ends.jsonl       a line for each start that was not the last
slurm/attempt          the number of the newest start: processes of an earlier one must stop (the fence)
slurm/nodes/aN/R.begun node R has begun in start N; R.ready: its setup is done; R.warned: it has forwarded a
                       warning; R.json: how it ended
slurm/cancel           requests the end
slurm/spare            space for the result of a job whose disk is full
exit.json              how the job ended, written once
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Document = dict[str, Any]

SCHEMA = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SPARE = 64 << 10
_TRIES = 30


def write(path: str, text: str, spare: str = "") -> None:
    """Replace the file atomically, and flush it to disk. On a full disk, `spare` is deleted to make room."""
    partial = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        try:
            _create(partial, text)
        except OSError as error:
            if error.errno not in _FULL or not spare:
                raise
            with contextlib.suppress(OSError):
                os.unlink(spare)
            _create(partial, text)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _create(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def exists(path: str) -> bool:
    """Return True if the file exists now.

    NFS caches the absence of a file with its directory's attributes, for half a minute and more. Opening the
    directory refreshes them (nfs(5)).
    """
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.dirname(path), os.O_RDONLY))
    return os.path.exists(path)


def read(path: str) -> Any:
    """Return the file's document, or None if it is missing or unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def fenced(path: str, attempt: int) -> bool:
    """Return True if the file names a later start than this one. False if it is unreadable now."""
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return False
    return text.isdigit() and int(text) > attempt


def append(path: str, document: Document) -> None:
    """Append a line, on a new line after one that a crash has truncated. Raises OSError."""
    line = json.dumps(dict(document, schema=SCHEMA)).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + line)
        os.fsync(fd)
    finally:
        os.close(fd)


def preallocate(path: str) -> None:
    """Reserve the disk space that `write` may need later."""
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(b"~" * _SPARE)
        file.flush()
        os.fsync(file.fileno())


def write_once(path: str, document: Document, spare: str) -> str | None:
    """Write the job's result unless there is one, with retries for 30 s. Return the error if that fails."""
    text = json.dumps(dict(document, schema=SCHEMA)) + "\n"
    problem = None
    for _ in range(_TRIES):
        if exists(path):
            return None
        try:
            write(path, text, spare)
            return None
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
            time.sleep(1)
    return problem
