"""`accel logs JOB`: print or follow what a job's ranks wrote; `accel submit --follow` uses the same printer.

stdout gets exactly the ranks' bytes, with `[rank N] ` before each line if there are several ranks. Messages
of `accel launch` itself, such as its report of a failure, and lines that list missing ones go to stderr.

If the job has not started, a line on stderr reports that, and -f waits. A job that ended before it reached its
target has no logs: an error with the reason, and exit code 1.

If lines are unavailable (a machine does not respond), the others are printed, a line on stderr names the
machine, and the exit code is 1. With -f the command waits for them until the job is over.

--json  a line each: {"rank", "attempt", "stream", "text", "cursor"}; "rank" is null for the launcher. A line
that is not UTF-8 also has "base64", its exact bytes. A line of more than 1 MiB comes in pieces; all but the
last have "partial": true. `--since CURSOR` continues exactly after the line, or piece, with that cursor;
`--since 10m` starts with the last ten minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from schedulers.printable import printable

from . import arguments, exit_status
from .argv import UsageError
from .output import age, note, print_json

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection

    from schedulers.job import Cursor, LogLine
    from schedulers.jobs.handle import Job

    from .arguments import Parser


EXAMPLES = """\
  accel logs -f @last
  accel logs --rank 0 --tail 20 1k2m
  accel logs --since 10m @last
  accel logs --json 1k2m | jq -r .text

Exits with 1 if lines are missing because a machine does not respond; the others are printed."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="job id, unique prefix of an id, or @last")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until the job ends")
    parser.add_argument("--rank", metavar="N", type=arguments.count, action="append", help="only this rank; repeatable")
    since = "start WHEN ago: 90 (seconds), 10m, 2h; or after a cursor of --json"
    parser.add_argument("--since", metavar="WHEN", type=_since, help=since)
    parser.add_argument("--tail", metavar="N", type=arguments.count, help="start with the last N lines of each rank")
    parser.add_argument("--no-prefix", action="store_true", help="omit the prefix [rank N]")
    parser.add_argument("--json", action="store_true", help="print a JSON line with a cursor per log line")
    arguments.add_job_arguments(parser)


def _since(text: str) -> str | float:
    """Return a cursor as it is, and a duration as the time that long ago, in seconds since the epoch."""
    if "=" in text:
        return text
    import time
    from argparse import ArgumentTypeError

    try:
        return time.time() - arguments.duration(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"neither a duration (10m, 2h) nor a log cursor of --json: {text!r}") from None


def run(args: Namespace) -> int:
    job = arguments.find_job("accel logs", args.job, args)
    _check_ranks(job, args.rank or ())
    prefix = False if args.no_prefix else has_many_ranks(job, args.rank)
    since = job.cursor(args.since)
    printer = LogPrinter(prefix=prefix, json=args.json, since=since, flush=args.follow)
    try:
        with report_standstill(job) if args.follow else contextlib.nullcontext():
            printer.print(job.logs(follow=args.follow, ranks=args.rank, since=since, tail=args.tail))
        if not args.follow:
            print_if_queued(job)
    except KeyboardInterrupt:
        if args.follow:
            print_how_to_stop(job)
        return exit_status.INTERRUPTED
    if args.rank and not printer.printed:
        note(f"job {job.id}: no lines of rank {', '.join(map(str, sorted(set(args.rank))))}")
    return exit_status.OK if printer.complete else exit_status.ERROR


def _check_ranks(job: Job, ranks: Collection[int]) -> None:
    """Raise UsageError for a rank that the job cannot have."""
    rank_count = job.spec.max_ranks
    excess = [rank for rank in ranks if rank_count is not None and rank >= rank_count]
    if excess:
        available = "one rank: 0" if rank_count == 1 else f"ranks 0 to {(rank_count or 0) - 1}"
        raise UsageError("accel logs", f"--rank {excess[0]}: job {job.id} has {available}")


# Log lines byte for byte on stdout; on stderr, why a followed job is queued.

_POLL_S = 0.75


class LogPrinter:
    """A printer of log lines: the ranks' to stdout, the launcher's and those that list missing lines to stderr.

    prefix: put `[rank N] ` before every rank's line; this also terminates an unterminated last line, which would
            otherwise run into the next rank's. None: from the first line of a rank other than 0.
    json:   print all lines as JSON on stdout, each with the cursor after it.

    `complete` is False once a line reported missing lines; `printed` is True after the first line.
    """

    def __init__(self, *, prefix: bool | None, json: bool, since: Cursor | None, flush: bool) -> None:
        from schedulers.job import Cursor
        from schedulers.store.log_lines import LogText

        self._text = LogText(prefix)
        self._json = json
        self._flush = flush
        self._cursor = Cursor.parse(str(since or ""))
        self.complete = True
        self.printed = False

    def print(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            self.printed = True
            if line.stream == "missing":  # the target's own words
                self.complete = False
                line = dataclasses.replace(line, text=printable(line.text))
            if self._json:
                self._cursor.advance(line)
                print_json(line.to_json() | {"cursor": str(self._cursor)}, one_line=True)
            elif line.rank is None or line.stream == "missing":
                self._print_launcher(line.data)
            else:
                sys.stdout.buffer.write(self._text.add(line))
            if self._flush:
                sys.stdout.flush()
        if self._text.prefix:
            sys.stdout.buffer.write(self._text.end())

    def _print_launcher(self, data: bytes) -> None:
        if self._text.prefix:
            sys.stdout.buffer.write(self._text.end())
        sys.stdout.flush()
        # Without prefixes stdout has the job's bytes only; on a terminal, an unended line is ended through stderr.
        sys.stderr.buffer.write(b"\n" * (self._text.unended and sys.stdout.isatty()) + data)
        sys.stderr.flush()


def has_many_ranks(job: Job, ranks: Sequence[int] | None) -> bool | None:
    """Return True if several ranks may write lines, so that each needs a prefix; None if unknown."""
    return job.spec.has_many_ranks if ranks is None else len(set(ranks)) > 1


@contextlib.contextmanager
def report_standstill(job: Job) -> Iterator[None]:
    """Report on stderr during the block why the job is queued, or cannot be polled, if that lasts; again on changes."""
    stopped = threading.Event()
    threading.Thread(target=_print_reason, args=(job, stopped), name="reason", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def print_if_queued(job: Job) -> None:
    """Print a line on stderr if the job has not started, or waits for a restart."""
    from schedulers.errors import SchedulerError
    from schedulers.job import State

    waiting = (State.SUBMITTING, State.QUEUED)
    status = job.record.status
    if status.state in waiting and job.native_id is not None:
        with contextlib.suppress(SchedulerError, OSError):  # then report the last known state
            status = job.status()
    if status.state in waiting:
        note(f"job {job.id} is {status.state.value}" + (f": {status.message}" if status.message else ""))


def _print_reason(job: Job, stopped: threading.Event) -> None:
    from schedulers.job import State

    reported = previous = ""
    while not stopped.wait(_POLL_S):
        status = job.record.status  # kept up to date by the follower of the job
        current = ""
        if status.state is State.SUBMITTING:
            current = "submitting"
        elif status.state is State.QUEUED and status.message:
            current = f"queued: {status.message}"
        if warning := job.record.warning:
            current = warning
        if current and current == previous and current != reported:
            reported = current
            seen = f"job {job.id} was {status.state.value} {age(time.time() - status.observed_at)} ago"
            note(f"{seen}: {warning}" if warning else f"job {job.id} is {current}")
        previous = current


def print_how_to_stop(job: Job) -> None:
    """Print a note after Ctrl-C that the job continues, with the commands to follow and cancel it."""
    note(f"job {job.id} continues; follow it again: accel logs -f {job.id}; cancel it: accel cancel {job.id}")
