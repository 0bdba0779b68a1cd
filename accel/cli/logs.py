"""`accel logs JOB`: print or follow the output of a job's ranks.

stdout gets exactly the ranks' bytes, with `[rank N] ` before each line if there are several ranks. Messages
of `accel launch` itself, such as its report of a failure, go to stderr.

If the job has not started, a line on stderr reports that, and -f waits. A job that ended before it reached
its
target has no logs: an error with the reason, and exit code 1.

If lines are unavailable (a machine does not respond), the others are printed, a line on stderr names the
machine, and the exit code is 1. With -f this applies once the job is over; until then the command waits for
them.

--json  a line each: {"rank", "attempt", "stream", "text", "cursor"}; "rank" is null for the launcher. A line
that is not UTF-8 also has "base64", its exact bytes. A line of more than 1 MiB comes in pieces; all but the
last have "partial": true. `--since CURSOR` continues exactly after the line, or piece, with that cursor;
`--since 10m` starts with the last ten minutes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from . import exit_status, job_args, option_values
from .argv import UsageError
from .output import note

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection

    from schedulers.jobs.handle import Job

    from .parser import Parser

EXAMPLES = """\
  accel logs -f @last
  accel logs --rank 0 --tail 20 1k2m
  accel logs --since 10m @last
  accel logs --json 1k2m | jq -r .text

Exits with 1 when lines are missing, because a machine that has some does not answer; the others are printed."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="an id, a unique prefix of one, or @last")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument(
        "--rank", metavar="N", type=option_values.count, action="append", help="only this rank; repeatable"
    )
    parser.add_argument(
        "--since", metavar="WHEN", type=_since, help="only the last 10m, 2h, …; or what follows a cursor of --json"
    )
    parser.add_argument(
        "--tail", metavar="N", type=option_values.count, help="only the last N lines of each rank so far"
    )
    parser.add_argument("--no-prefix", action="store_true", help="never put [rank N] before a line")
    parser.add_argument("--json", action="store_true", help="answer in JSON, a line each, with cursors")
    job_args.add_arguments(parser)


def _since(text: str) -> str | float:
    """Return a cursor as it is, and a duration as the time that long ago, in seconds since the epoch."""
    if "=" in text:
        return text
    import time
    from argparse import ArgumentTypeError

    try:
        return time.time() - option_values.duration(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"neither a duration (10m, 2h) nor a log cursor of --json: {text!r}") from None


def run(args: Namespace) -> int:
    from .stream import LogPrinter, has_many_ranks, say_how_to_stop, say_that_it_waits, why_it_waits

    job = job_args.find("accel logs", args.job, args)
    _check_ranks(job, args.rank or ())
    prefix = False if args.no_prefix else has_many_ranks(job, args.rank)
    since = job.cursor(args.since)
    printer = LogPrinter(prefix=prefix, json=args.json, since=since, flush=args.follow)
    try:
        with why_it_waits(job) if args.follow else contextlib.nullcontext():
            printer.print(job.logs(follow=args.follow, ranks=args.rank, since=since, tail=args.tail))
        if not args.follow:
            say_that_it_waits(job)
    except KeyboardInterrupt:
        if args.follow:
            say_how_to_stop(job)
        return exit_status.INTERRUPTED
    if args.rank and not printer.printed:
        note(f"job {job.id}: no lines of rank {', '.join(map(str, sorted(set(args.rank))))}")
    return exit_status.OK if printer.complete else exit_status.ERROR


def _check_ranks(job: Job, ranks: Collection[int]) -> None:
    """Raise UsageError for a rank that the job cannot have."""
    from .stream import most_ranks

    most = most_ranks(job.spec)
    beyond = [rank for rank in ranks if most is not None and rank >= most]
    if beyond:
        there = "one rank: 0" if most == 1 else f"ranks 0 to {(most or 0) - 1}"
        raise UsageError("accel logs", f"--rank {beyond[0]}: job {job.id} has {there}")
