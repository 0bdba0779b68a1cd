"""A cache of squeue's output for all jobs of this user, shared by all processes.

Each caller writes the output to the root, and others read it until it is too old. So Slurm is queried every
1.5 s at most, however many processes wait, and less often if it responds slowly. Sent to login nodes with
`job_ops.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import time
import zlib

from . import slurm_commands as commands

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Step = commands.Step
    Row = commands.Row

PACE_S, SLOWEST_S = 1.5, 30.0
# Output is valid for so many times the duration of squeue: a slow controller is queried less often. After an error it
# is queried again sooner.
_REST, _REST_OF_ERROR = 10.0, 2.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class CachedOutput:
    """squeue's output, or why it failed. `asked_at`: a time before the call."""

    def __init__(self, asked_at: float, took_s: float, error: str, text: str) -> None:
        self.asked_at = asked_at
        self.took_s = took_s
        self.error = error
        self.text = text

    @functools.cached_property
    def rows(self) -> dict[str, Row]:
        """The rows by job number."""
        return {row["id"]: row for row in commands.queue_rows(self.text)}

    def is_fresh(self, since: float) -> bool:
        """Return True if it is still valid. One from a machine whose clock is ahead is not."""
        pace_s = max(PACE_S, min(SLOWEST_S, self.took_s * (_REST_OF_ERROR if self.error else _REST)))
        return since <= self.asked_at and 0 <= time.time() - self.asked_at - self.took_s < pace_s


_cache: dict[str, CachedOutput] = {}


def read(root: str, step: Step, since: float = 0.0) -> CachedOutput:
    """Return squeue's output, new or cached, from after `since` (our clock). Raises Unanswered, CommandFailed."""
    path = _path(root, step)
    answer = _cache.get(path)
    if answer is None or not answer.is_fresh(since):
        answer = _load(path)
    if answer is None or not answer.is_fresh(since):
        with _exclusive(path + ".lock"):
            answer = _load(path)
            if answer is None or not answer.is_fresh(since):
                answer = _run_squeue(step)
                _save(path, answer)
    _cache[path] = answer
    if answer.error:
        raise commands.Unanswered(answer.error)
    return answer


def forget(root: str, step: Step) -> None:
    """Drop the cached output: a job was removed from the queue."""
    path = _path(root, step)
    _cache.pop(path, None)
    with contextlib.suppress(OSError):
        os.unlink(path)


def try_lock(lock: int) -> bool:
    """Return True if the file is now locked for us, or its file system has no locks. Raises OSError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _path(root: str, step: Step) -> str:
    """Return the cache's path, which differs for each user, machine and cluster: homes are shared between these."""
    cache_key = [os.getuid(), step.get("clusters"), os.environ.get("SLURM_CONF"), _boot_id(), shutil.which("squeue")]
    return os.path.join(root, f"slurm-queue-{zlib.crc32(json.dumps(cache_key).encode()):08x}")


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _run_squeue(step: Step) -> CachedOutput:
    polled_at, started_at = time.time(), time.monotonic()
    text = error = ""
    try:
        text = commands.queue_text(step)
    except commands.Unanswered as problem:
        error = str(problem)
    return CachedOutput(polled_at, time.monotonic() - started_at, error, text)


def _load(path: str) -> CachedOutput | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            head, text = json.loads(file.readline()), file.read()
        return CachedOutput(float(head["asked_at"]), float(head["took_s"]), str(head["error"]), text)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(path: str, answer: CachedOutput) -> None:
    """Write the cache atomically. If that fails, each process queries for itself."""
    head = {"asked_at": answer.asked_at, "took_s": answer.took_s, "error": answer.error}
    partial = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    content = (json.dumps(head) + "\n" + answer.text).encode("utf-8", "surrogateescape")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)


@contextlib.contextmanager
def _exclusive(path: str) -> Iterator[None]:
    """Hold the lock if possible. Continue without it after 30 s: its holder may have been stopped."""
    lock = -1
    try:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            deadline = time.monotonic() + commands.COMMAND_TIMEOUT_S
            while not try_lock(lock) and time.monotonic() < deadline:
                time.sleep(0.02)
        yield
    finally:
        if lock >= 0:
            os.close(lock)
