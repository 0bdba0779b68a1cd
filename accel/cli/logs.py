"""`accel logs JOB`: print or follow what a job's ranks wrote.

stdout gets exactly the bytes that the ranks wrote, behind a `[rank N] ` at the start of each line when there are
several. What `accel launch` itself said, such as its report of a failure, goes to stderr.

--json  a line each: {"rank", "attempt", "stream", "text", "cursor"}; "rank" is null for the launcher. A line that is
        not UTF-8 also has "base64", its exact bytes. `--since CURSOR` goes on exactly after the line with that cursor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exits, values

if TYPE_CHECKING:
    from argparse import Namespace

    from .parser import Parser

EXAMPLES = """\
  accel logs -f @last
  accel logs --rank 0 --tail 20 1k2m
  accel logs --json 1k2m | jq -r .text"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="an id, a unique prefix of one, or @last")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    parser.add_argument("--rank", metavar="N", type=values.whole, action="append", help="only this rank; repeatable")
    parser.add_argument("--since", metavar="CURSOR", help="only what follows a cursor, as --json gives it")
    parser.add_argument("--tail", metavar="N", type=values.whole, help="only the last N lines of each rank so far")
    parser.add_argument("--no-prefix", action="store_true", help="never put [rank N] before a line")
    parser.add_argument("--json", action="store_true", help="answer in JSON, a line each, with cursors")


def run(args: Namespace) -> int:
    from schedulers.handle import find

    from .stream import LogPrinter, has_many_ranks, say_how_to_stop

    job = find(args.job)
    prefix = False if args.no_prefix else has_many_ranks(job, args.rank)
    printer = LogPrinter(prefix=prefix, json=args.json, since=args.since, flush=args.follow)
    try:
        printer.print(job.logs(follow=args.follow, ranks=args.rank, since=args.since, tail=args.tail))
    except KeyboardInterrupt:
        if args.follow:
            say_how_to_stop(job)
        return exits.INTERRUPTED
    return exits.OK
