"""Output of a job's log lines, byte for byte, and messages while following them."""

from __future__ import annotations

import base64
import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from schedulers.printable import printable

from .output import note

if TYPE_CHECKING:
    from schedulers.job import Cursor, JobSpec, LogLine
    from schedulers.jobs.handle import Job

_LOOK_S = 0.75


class LogPrinter:
    """A printer of log lines: the ranks' to stdout, the launcher's (its report of a failure) to stderr.

    prefix: put `[rank N] ` before every rank's line; this also terminates an unterminated last line, which would
            otherwise run into the next rank's. None: from the first line of a rank other than 0.
    json:   print all lines as JSON on stdout, each with the cursor after it.

    `complete` is False once a line reported missing lines; `printed` is True after the first line.
    """

    def __init__(self, *, prefix: bool | None, json: bool, since: Cursor | None, flush: bool) -> None:
        from schedulers.job import Cursor

        self._prefix = prefix
        self._json = json
        self._flush = flush
        self._cursor = Cursor.parse(str(since or ""))
        self._unended = False
        self._going_on: tuple[str, int] | None = None  # source and rank of the line that the last piece is of
        self.complete = True
        self.printed = False

    def print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.printed = True
            self.complete = self.complete and line.stream != "missing"
            if self._json:
                self._print_json(line)
            elif line.rank is None:
                self._print_launcher(_bytes(line))
            else:
                self._print_rank(line.rank, line)
            if self._flush:
                sys.stdout.flush()
        if self._prefix:
            self._end_line()

    def _print_json(self, line: LogLine) -> None:
        from .output import print_json

        self._cursor.advance(line)
        print_json(line_json(line) | {"cursor": str(self._cursor)}, one_line=True)

    def _print_rank(self, rank: int, line: LogLine) -> None:
        if self._prefix is None and rank:
            self._prefix = True
        data = _bytes(line)
        if self._prefix and self._going_on != (line.source, rank):
            self._end_line()
            data = f"[rank {rank}] ".encode() + data
        sys.stdout.buffer.write(data)
        self._unended = not data.endswith((b"\n", b"\r"))
        self._going_on = (line.source, rank) if line.partial else None

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
            self._going_on = None


def line_json(line: LogLine) -> dict[str, Any]:
    """Return a line as JSON values. If it is not UTF-8, `base64` has its exact bytes; a piece is `partial`."""
    data = _bytes(line)
    text = data.decode(errors="replace")
    exact = {} if text.encode() == data else {"base64": base64.b64encode(data).decode()}
    partial = {"partial": True} if line.partial else {}
    return {"rank": line.rank, "attempt": line.attempt, "stream": line.stream, "text": text} | exact | partial


def has_many_ranks(job: Job, ranks: Sequence[int] | None) -> bool | None:
    """Return True if several ranks may write lines, so that each needs a prefix; None if unknown."""
    if ranks is not None:
        return len(set(ranks)) > 1
    spec = job.spec
    most = most_ranks(spec)
    return most > 1 if most is not None else (spec.max_nodes or spec.nodes) > 1 or None


def most_ranks(spec: JobSpec) -> int | None:
    """Return the job's largest world size; None if each node starts one rank per accelerator that it finds."""
    each = spec.procs_per_node or spec.resources.gpus
    return (spec.max_nodes or spec.nodes) * each if each else None


@contextlib.contextmanager
def why_it_waits(job: Job) -> Iterator[None]:
    """Report on stderr during the block why the job is queued, if that lasts, and again after changes."""
    over = threading.Event()
    threading.Thread(target=_say_why, args=(job, over), name="why it waits", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def say_that_it_waits(job: Job) -> None:
    """Print a line on stderr if the job has not started, or waits for a restart."""
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
    """Print a note after Ctrl-C that the job goes on, with the commands to follow and cancel it."""
    note(f"job {job.id} goes on; follow it again: accel logs -f {job.id}; cancel it: accel cancel {job.id}")


def _bytes(line: LogLine) -> bytes:
    """Return the line's bytes. A message of the target itself is made printable."""
    text = printable(line.text) if line.stream == "missing" else line.text
    return text.encode("utf-8", "surrogateescape")
