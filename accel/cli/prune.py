"""`accel prune`: delete the records and logs of jobs that have ended. A job that has not ended is never touched.

stdout has the id of each deleted job in a line of its own.

--json  {"pruned": […ids], "dry_run": true or false}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exits, values
from .output import note, print_json
from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from .parser import Parser

EXAMPLES = """\
  accel prune --older-than 30d
  accel prune --keep 100 --dry-run
  accel prune 1k2m 1k2n

A damaged record is deleted only when its JOB is named."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="an id, a unique prefix of one, or @last")
    parser.add_argument("--older-than", metavar="TIME", type=values.duration, help="jobs submitted before: 30d, 2w")
    parser.add_argument("--keep", metavar="N", type=values.whole, help="all but the newest N jobs")
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, and delete nothing")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def run(args: Namespace) -> int:
    if not args.jobs and args.older_than is None and args.keep is None:
        raise UsageError("accel prune", "say which jobs: --older-than TIME, --keep N, or JOB …")
    if args.jobs and not (args.older_than is None and args.keep is None):
        raise UsageError("accel prune", "name jobs, or give --older-than and --keep: not both")
    from schedulers.handle import list_jobs
    from schedulers.store import Store

    list_jobs()  # a job that nobody has asked about since it ended still counts as running in its record
    pruned = Store.default().prune(
        older_than_s=args.older_than, keep=args.keep, ids=args.jobs or None, dry_run=args.dry_run
    )
    if args.json:
        print_json({"pruned": pruned, "dry_run": args.dry_run})
        return exits.OK
    for job_id in pruned:
        print(job_id)
    note(f"{len(pruned)} jobs {'would be ' if args.dry_run else ''}deleted")
    return exits.OK
