"""`accel prune`: delete the records and logs of ended jobs, here and on their targets.

On a target these are, for example, the directories on the hosts of an ssh target. A job that has not ended is
touched only with --force, which is for a backend that is gone for good: what runs there, runs on. Packed code that no
job uses, and that was not used for a day, is deleted too.

stdout has the id of each deleted job on a line of its own.

--json  {"pruned": […ids], "left": [a line for what could not be deleted, as when a target cannot be reached],
         "snapshots": [digests of packed code], "dry_run": …}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import arguments, exit_status
from .argv import UsageError
from .output import counted, note, print_json

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel prune --older-than 30d
  accel prune --keep 100 --dry-run
  accel prune 1k2m 1k2n
  accel prune --force 1k2m

A damaged record is deleted only when its JOB is named."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="job id, unique prefix of an id, or @last")
    age = "delete jobs that ended before TIME ago (30d, 2w)"
    parser.add_argument("--older-than", metavar="TIME", type=arguments.duration, help=age)
    parser.add_argument("--keep", metavar="N", type=arguments.count, help="delete all but the newest N jobs")
    parser.add_argument("--force", action="store_true", help="delete each JOB in any state, even if it may still run")
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted, delete nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    if not args.jobs and args.older_than is None and args.keep is None:
        raise UsageError("accel prune", "no jobs selected: give --older-than TIME, --keep N, or JOB …")
    if args.jobs and not (args.older_than is None and args.keep is None):
        raise UsageError("accel prune", "JOB contradicts --older-than and --keep: keep one")
    if args.force and not args.jobs:
        raise UsageError("accel prune", "--force deletes jobs that may still run: name each JOB")
    from schedulers.errors import StoreError
    from schedulers.jobs.handle import list_jobs
    from schedulers.jobs.prune import prune
    from schedulers.store.snapshot import prune_snapshots
    from schedulers.store.store import Store

    store = Store.default()
    records = list_jobs(store=store)  # polls: the record of a job that has ended since the last poll still says running
    summary = prune(
        store,
        older_than_s=args.older_than,
        keep=args.keep,
        ids=args.jobs or None,
        dry_run=args.dry_run,
        force=args.force,
        records=records,
    )
    remaining = [job for job in records if job.id not in summary.ids]
    problems, snapshots = list(summary.kept_reasons), []
    try:
        snapshots = prune_snapshots(store.home, remaining, dry_run=args.dry_run)
    except StoreError as error:
        problems.append(str(error))
    for line in problems:
        note(line)
    if args.json:
        pruned = {"pruned": list(summary.ids), "left": problems, "snapshots": snapshots}
        print_json({**pruned, "dry_run": args.dry_run})
        return exit_status.OK
    for job_id in summary.ids:
        print(job_id)
    unused = f" and {counted(len(snapshots), 'unused snapshot', 'of code')}" if snapshots else ""
    note(f"{counted(len(summary.ids), 'job')}{unused} {'would be ' if args.dry_run else ''}deleted")
    return exit_status.OK
