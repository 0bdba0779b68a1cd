"""Files in a job's directory on the shared file system: whole whenever they are read, and told apart from none.

slurm/settings.json    what to run; slurm/secrets.json values for the ranks' environment, removed when the job cannot be
                       started again
slurm/attempts.jsonl   a line for each start of the batch script; slurm/ends.jsonl one for each that was not the last
slurm/attempt          the number of the newest start: whoever belongs to an earlier one is to stop (the fence)
slurm/nodes/aN/R.begun node R has begun in the start numbered N; R.ready it has done its setup; R.warned it has passed a
                       warning on; R.json how it ended
slurm/cancel           asks for the end
slurm/spare            space for the last words of a job whose disk is full
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
    """Replaces the file in one step, on the disk when this returns. On a full disk `spare` makes room for it."""
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
    """Whether the file is there now. Over NFS, one that was looked for in vain stays missing for as long as the
    attributes of its directory are kept, half a minute and more; who opens that has them asked for (nfs(5))."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.dirname(path), os.O_RDONLY))
    return os.path.exists(path)


def read(path: str) -> Any:
    """The document in the file; None when there is none, or none that can be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def fenced(path: str, attempt: int) -> bool:
    """Whether the file says that a later start than this one has begun; not, when it cannot be read just now."""
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return False
    return text.isdigit() and int(text) > attempt


def lines(path: str, start: int = 0) -> list[Document]:
    """The whole documents in the file from a byte on, a line each; what a crash has cut short is left out."""
    found = []
    try:
        with open(path, "rb") as file:
            file.seek(start)
            rows = file.read().splitlines()
    except OSError:
        return []
    for row in rows:
        try:
            document = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def append(path: str, document: Document) -> None:
    """Adds a line, after the end of one that a crash has cut short. Raises OSError."""
    line = json.dumps(dict(document, schema=SCHEMA)).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + line)
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(path: str) -> None:
    """Takes space now that `write` may need when there is none left."""
    with contextlib.suppress(OSError), open(path, "wb") as file:
        file.write(b"~" * _SPARE)
        file.flush()
        os.fsync(file.fileno())


def write_once(path: str, document: Document, spare: str) -> str | None:
    """For how the job ended: a result that is there stays. What cannot be written is tried again for a while; why it
    could not be is returned then."""
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
