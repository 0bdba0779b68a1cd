"""The queue for this machine: first come, first served, over lock files that the kernel releases when a holder dies.

    queue/<job id>    locked by a job that waits; the next in line waits for it, and nobody polls but the first
    slots/<name>      locked by the job that has that GPU, processor or place

Locks are per machine (a home directory may be shared by several), so nothing is to be cleaned up after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError

_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Want:
    """So many of these slots, whichever are free."""

    what: str
    count: int
    of: Sequence[str]


class Slots:
    """The slots of this machine that one job waits for and then holds, until `release` or the end of its process."""

    def __init__(self, home: Path, job_id: str) -> None:
        root = home / "local" / _machine()
        self._queue, self._slots = root / "queue", root / "slots"
        for directory in (self._queue, self._slots):
            directory.mkdir(parents=True, exist_ok=True)
        self._job_id = job_id
        self._held: list[int] = []
        self._ticket: int | None = None

    def line_up(self) -> None:
        """Takes the job's place in the queue, unless it has it. Raises OSError."""
        path = self._queue / self._job_id
        while self._ticket is None:
            fd = _lock(path, wait=True)
            assert fd is not None  # it has waited
            self._ticket = fd
            if not _is_at(fd, path):  # taken for a dead job's, and removed, before it was locked
                self._ticket = None
                os.close(fd)

    def acquire(self, wants: Sequence[Want], waiting: Callable[[str], None]) -> list[list[str]]:
        """Waits for its turn and for the slots; gives the names that each want got.

        `waiting` is called whenever the reason for waiting changes, and may raise to give up. Raises SpecError for
        more slots than there are.
        """
        for want in wants:
            if want.count > len(want.of):
                raise SpecError(f"{want.count} {want.what} asked for, and this machine has {len(want.of)}")
        self.line_up()
        try:
            self._wait_for_turn(waiting)
            return self._take(wants, waiting)
        finally:
            self.step_out()

    def step_out(self) -> None:
        """Gives up the job's place in the queue, where it has one."""
        if self._ticket is not None:
            with contextlib.suppress(FileNotFoundError):
                (self._queue / self._job_id).unlink()
            os.close(self._ticket)
            self._ticket = None

    def release(self) -> None:
        for fd in self._held:
            os.close(fd)
        self._held.clear()

    def _wait_for_turn(self, waiting: Callable[[str], None]) -> None:
        while before := self._before():
            waiting(f"waits for its turn behind job {before.name}")
            fd = _lock(before, wait=True)
            if fd is None:
                continue
            # Locked, so its owner has gone on or died: the ticket is void either way.
            if _is_at(fd, before):
                with contextlib.suppress(FileNotFoundError):
                    before.unlink()
            os.close(fd)

    def _before(self) -> Path | None:
        """The ticket just before ours. Job ids sort by time."""
        earlier = [name for name in os.listdir(self._queue) if name < self._job_id]
        return self._queue / max(earlier) if earlier else None

    def _take(self, wants: Sequence[Want], waiting: Callable[[str], None]) -> list[list[str]]:
        while True:
            got = [self._try(want) for want in wants]
            short = next((want for want, names in zip(wants, got, strict=True) if len(names) < want.count), None)
            if short is None:
                return got
            self.release()
            waiting(f"waits for {short.count} of this machine's {len(short.of)} {short.what}")
            time.sleep(_POLL_S)

    def _try(self, want: Want) -> list[str]:
        names: list[str] = []
        for name in want.of:
            if len(names) == want.count:
                break
            fd = _lock(self._slots / name.replace("/", "_"), wait=False)
            if fd is not None:
                self._held.append(fd)
                names.append(name)
        return names


def _machine() -> str:
    return platform.node() or "this-machine"


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one of this name."""
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _lock(path: Path, *, wait: bool) -> int | None:
    """An exclusive lock on the file, as its descriptor; None when it is held and `wait` is false."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:  # told to stop while it waited
        os.close(fd)
        raise
    return fd
