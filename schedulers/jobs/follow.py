"""Waiting for a job and following its output, implemented once for all targets."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..errors import Unreachable
from ..job import Cursor, LogLine, Status

if TYPE_CHECKING:
    from threading import Event

    from ..store.record import Record
    from ..target import Target

_SLICE_S = 1.0  # longest wait on the target before stop and deadline are checked again
_FIRST_POLL_S, _LAST_POLL_S = 1.0, 30.0
_FIRST_READ_S, _LAST_READ_S = 0.1, 1.0
_FIRST_EARLY_S = 0.005
_MAX_PIECES = 16  # of a line, of 1 MiB each, that are held in memory

_Read: TypeAlias = "Callable[[Cursor], Iterator[LogLine]]"


class Followed(Protocol):
    """The interface of a job whose output is followed; `schedulers.jobs.handle.Job` documents its members."""

    @property
    def record(self) -> Record: ...
    @property
    def native_id(self) -> str | None: ...
    def status(self) -> Status: ...
    def waiting_target(self) -> Target | None: ...
    def read_logs(self, cursor: Cursor, /) -> Iterator[LogLine]: ...
    def tail_at(self, cursor: Cursor, count: int, /) -> Cursor | None: ...


class Backoff:
    """The pauses of one waiter. A deadline, a stop event or a change on the target ends them early."""

    def __init__(self, stop: Event | None, deadline: float | None) -> None:
        self._stop = stop
        self._deadline = deadline
        self._polls = 0
        self._early = 0

    @property
    def stopped(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    @property
    def over(self) -> bool:
        return self.stopped or (self._deadline is not None and time.monotonic() >= self._deadline)

    def wait_for_change(self, target: Target | None, native_id: str | None) -> None:
        """Wait until the job may have ended or must be polled again: 1 s at first, later up to 30 s."""
        changed = self.wait_on_target(target, native_id, _SLICE_S)
        if changed is None:
            self.sleep(self.poll_after() if target is not None else _SLICE_S / 10)
            return
        poll_at = time.monotonic() + self.poll_after()
        while not (changed or self.over or time.monotonic() >= poll_at):
            changed = self.wait_on_target(target, native_id, _SLICE_S)

    def poll_after(self) -> float:
        """Return the seconds until the next poll; random in part, so that waiters do not poll in step."""
        self._polls += 1
        import random  # not needed to list or to submit

        return float(min(_LAST_POLL_S, _FIRST_POLL_S * 1.3 ** (self._polls - 1))) * random.uniform(0.8, 1.2)

    def wait_on_target(self, target: Target | None, native_id: str | None, seconds: float) -> bool | None:
        """Wait, at most `seconds`, for the target to be notified that the job may have ended.

        Returns False if only the time is over; None, at once, if the target gets no notifications.
        """
        from ..target import SupportsWait

        if native_id is None or not isinstance(target, SupportsWait):
            return None
        started_at = time.monotonic()
        limit = self._limited(seconds)
        changed = target.wait(native_id, limit)
        # A target that returns early time and again has no event to wait for, and must not be polled in a tight loop.
        self._early = self._early + 1 if time.monotonic() - started_at < limit / 2 else 0
        if self._early > 1:
            self.sleep(min(seconds, _FIRST_EARLY_S * 2 ** min(self._early, 10)))
        return changed is not False

    def sleep(self, seconds: float) -> None:
        if self._stop is not None:
            self._stop.wait(self._limited(seconds))
        else:
            time.sleep(self._limited(seconds))

    def _limited(self, seconds: float) -> float:
        return seconds if self._deadline is None else max(0.0, min(seconds, self._deadline - time.monotonic()))


def read_once(job: Followed, cursor: Cursor, ranks: Collection[int] | None, tail: int | None) -> Iterator[LogLine]:
    """Return the lines that exist now."""
    start = cursor if tail is None else job.tail_at(cursor, tail)
    if start is None:
        return _last(job.read_logs, cursor, ranks, tail or 0)
    return (line for line in job.read_logs(start) if ranks is None or line.rank in ranks)


def follow(
    job: Followed, cursor: Cursor, ranks: Collection[int] | None, tail: int | None, backoff: Backoff
) -> Iterator[LogLine]:
    """Yield the existing lines and those to come, until the job is over and all its lines were yielded."""
    if tail is not None:
        yield from _catch_up(job, cursor, ranks, tail, backoff)
    poll_at, idle = 0.0, _FIRST_READ_S
    status = job.status()
    if not status.state.final:  # register with the target before the first line, however many there are
        backoff.wait_on_target(job.waiting_target(), job.native_id, 0.0)
    while not backoff.stopped:
        # Polled before reading: if the job was over by then, the lines read now are the last ones.
        if not status.state.final and time.monotonic() >= poll_at:
            status = job.status()
            poll_at = time.monotonic() + backoff.poll_after()
        count = 0
        try:
            for line in job.read_logs(cursor):
                count += 1
                cursor.advance(line)
                if ranks is None or line.rank in ranks:
                    yield line
        except Unreachable as error:
            job.record.warning = str(error)
        else:
            if status.state.final and not count:
                return
        if count or status.state.final:
            idle = _FIRST_READ_S
        if not count:
            changed = backoff.wait_on_target(job.waiting_target(), job.native_id, idle)
            if changed:
                poll_at = 0.0
            elif changed is None:
                backoff.sleep(idle)
            idle = min(_LAST_READ_S, idle * 1.5)


def _catch_up(
    job: Followed, cursor: Cursor, ranks: Collection[int] | None, tail: int, backoff: Backoff
) -> Iterator[LogLine]:
    """Move the cursor to the last lines of each rank, or yield them if only reading past them finds them."""
    while not backoff.stopped:
        try:
            start = job.tail_at(cursor, tail)
        except Unreachable as error:
            job.record.warning = str(error)
            backoff.sleep(_LAST_READ_S)
            continue
        if start is not None:
            cursor.move(start)
            return
        break

    def read(since: Cursor) -> Iterator[LogLine]:
        with contextlib.suppress(Unreachable):
            yield from job.read_logs(since)

    yield from _last(read, cursor, ranks, tail)


@dataclass
class _Line:
    """The pieces of a line; of one with more than _MAX_PIECES, only its start and the number of pieces."""

    number: int
    start: str | None
    count: int = 0
    pieces: list[LogLine] = field(default_factory=list)

    def add(self, piece: LogLine) -> None:
        self.count += 1
        self.pieces.append(piece)
        if self.count > _MAX_PIECES:
            del self.pieces[:-1]

    def read(self, read: _Read, end: Cursor) -> Iterator[LogLine]:
        if self.count <= _MAX_PIECES:
            return iter(self.pieces)
        (last,) = self.pieces
        lines = read(end.moved({last.source: self.start}))
        return itertools.islice((x for x in lines if (x.source, x.rank) == (last.source, last.rank)), self.count)


def _last(read: _Read, cursor: Cursor, ranks: Collection[int] | None, count: int) -> Iterator[LogLine]:
    """Yield the last `count` finished lines of each rank and the unfinished ones, in the order they began.

    Moves the cursor to the end. Very long lines are read a second time instead of held in memory.
    """
    finished: dict[int | None, deque[_Line]] = {}
    unfinished: dict[tuple[str, int | None], _Line] = {}
    for number, line in enumerate(read(cursor.moved({}))):
        if ranks is None or line.rank in ranks:
            entry = unfinished.setdefault((line.source, line.rank), _Line(number, cursor.position(line.source)))
            entry.add(line)
            if not line.partial:
                finished.setdefault(line.rank, deque(maxlen=max(0, count))).append(entry)
                del unfinished[line.source, line.rank]
        cursor.advance(line)
    entries = [*(entry for rank_lines in finished.values() for entry in rank_lines), *unfinished.values()]
    for entry in sorted(entries, key=lambda entry: entry.number):
        yield from entry.read(read, cursor)
