"""Writing a job's log lines, byte for byte, and what is said to people while they are followed."""

from __future__ import annotations

import base64
import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .output import note

if TYPE_CHECKING:
    from schedulers.handle import Job
    from schedulers.job import Cursor, LogLine

_LOOK_S = 0.75


class LogPrinter:
    """Prints lines as they come: the ranks' to stdout, the launcher's own (its report of a failure) to stderr.

    prefix: put `[rank N] ` before every rank's line; this also ends a last line that had no ending of its own, which
            would otherwise run into the next rank's. None: from the first line on that is not rank 0's.
    json:   all lines as JSON on stdout, each with the cursor from which reading goes on after it.

    `complete` is False once a line said that others could not be had.
    """

    def __init__(self, *, prefix: bool | None, json: bool, since: Cursor | None, flush: bool) -> None:
        from schedulers.job import Cursor

        self._prefix = prefix
        self._json = json
        self._flush = flush
        self._cursor = Cursor.parse(str(since or ""))
        self._unended = False
        self.complete = True

    def print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.complete = self.complete and line.stream != "missing"
            if self._json:
                self._print_json(line)
            elif line.rank is None:
                self._print_launcher(_bytes(line))
            else:
                self._print_rank(line.rank, _bytes(line))
            if self._flush:
                sys.stdout.flush()
        if self._prefix:
            self._end_line()

    def _print_json(self, line: LogLine) -> None:
        from .output import print_json

        self._cursor.advance(line)
        print_json(line_json(line) | {"cursor": str(self._cursor)}, one_line=True)

    def _print_rank(self, rank: int, data: bytes) -> None:
        if self._prefix is None and rank:
            self._prefix = True
        if self._prefix:
            self._end_line()
            data = f"[rank {rank}] ".encode() + data
        sys.stdout.buffer.write(data)
        self._unended = not data.endswith((b"\n", b"\r"))

    def _print_launcher(self, data: bytes) -> None:
        if self._prefix:
            self._end_line()
        sys.stdout.flush()
        # Without prefixes stdout holds the job's bytes alone, so a half line there is ended where people look.
        sys.stderr.buffer.write(b"\n" * (self._unended and sys.stdout.isatty()) + data)
        sys.stderr.flush()

    def _end_line(self) -> None:
        if self._unended:
            sys.stdout.buffer.write(b"\n")
            self._unended = False


def line_json(line: LogLine) -> dict[str, Any]:
    """A line as JSON values. One that is not UTF-8 also has its exact bytes, in `base64`."""
    data = _bytes(line)
    text = data.decode(errors="replace")
    exact = {} if text.encode() == data else {"base64": base64.b64encode(data).decode()}
    return {"rank": line.rank, "attempt": line.attempt, "stream": line.stream, "text": text} | exact


def has_many_ranks(job: Job, ranks: Sequence[int] | None) -> bool | None:
    """Whether lines of more than one rank may come, so that each must say whose it is. None: only the lines tell."""
    if ranks is not None:
        return len(set(ranks)) > 1
    spec = job.spec
    nodes = spec.max_nodes or spec.nodes
    if nodes > 1 or spec.procs_per_node or spec.resources.gpus:
        return nodes * (spec.procs_per_node or max(1, spec.resources.gpus)) > 1
    return None  # one for each accelerator that the job finds


@contextlib.contextmanager
def why_it_waits(job: Job) -> Iterator[None]:
    """Meanwhile says on stderr why the job is queued, when that is more than passing, and again when it changes."""
    over = threading.Event()
    threading.Thread(target=_say_why, args=(job, over), name="why it waits", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def say_that_it_waits(job: Job) -> None:
    """Write a line to stderr when the job has not started, or waits to be started again."""
    from schedulers.errors import SchedulerError
    from schedulers.job import State

    waiting = (State.SUBMITTING, State.QUEUED)
    status = job.record.status
    if status.state in waiting and job.native_id is not None:
        with contextlib.suppress(SchedulerError, OSError):  # the last known state is said then
            status = job.status()
    if status.state in waiting:
        note(f"job {job.id} is {status.state.value}" + (f": {status.message}" if status.message else ""))


def _say_why(job: Job, over: threading.Event) -> None:
    from schedulers.job import State

    said = before = ""
    while not over.wait(_LOOK_S):
        status = job.record.status  # as whoever follows the job has asked for it
        now = ""
        if status.state is State.SUBMITTING:
            now = "submitting"
        elif status.state is State.QUEUED and status.message:
            now = f"queued: {status.message}"
        if now and now == before and now != said:
            said = now
            note(f"job {job.id} is {now}")
        before = now


def say_how_to_stop(job: Job) -> None:
    """After Ctrl-C: the job goes on, and this is how to come back to it or to end it."""
    note(f"job {job.id} goes on; follow it again: accel logs -f {job.id}; cancel it: accel cancel {job.id}")


def _bytes(line: LogLine) -> bytes:
    return line.text.encode("utf-8", "surrogateescape")
