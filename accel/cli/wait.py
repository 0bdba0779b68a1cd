"""`accel wait JOB…`: wait for jobs to end and exit with their code.

stdout has a line for each job once it has ended: its id, a tab, its state.

--json  {"jobs": […]}, each in the shape of `accel.cli.output`, ended or not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import arguments, exit_status
from .output import note, outcome, print_json, record_json

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.jobs.handle import Job

    from .arguments import Parser

_FRESH_S = 5.0
EXAMPLES = """\
  accel wait @last && echo trained
  accel wait --timeout 30m 1k2m 1k2n

Exits with the exit code of the first job that did not succeed: that of its first failing rank, 143 if it was
cancelled, 124 if --timeout expired before it ended."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="job id, unique prefix of an id, or @last")
    timeout = "stop waiting after TIME: 90 (seconds), 30m, 2h"
    parser.add_argument("--timeout", metavar="TIME", type=arguments.duration, help=timeout)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    from schedulers.jobs import handle

    from .logs import print_how_to_stop

    jobs = arguments.find_jobs("accel wait", args.jobs, args)
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    codes = []
    refreshed = float("-inf")
    for index, job in enumerate(jobs):
        try:
            if index + 1 < len(jobs) and time.monotonic() - refreshed > _FRESH_S:
                handle.refresh(jobs[index:])  # one query for all that have ended by now
                refreshed = time.monotonic()
            codes.append(_wait(job, deadline, quiet=args.json))
        except KeyboardInterrupt:
            print_how_to_stop(job)
            return exit_status.INTERRUPTED
    if args.json:
        print_json({"jobs": [record_json(job.record) for job in jobs]})
    return next((code for code in codes if code != exit_status.OK), exit_status.OK)


def _wait(job: Job, deadline: float | None, *, quiet: bool) -> int:
    from .logs import report_standstill

    try:
        with report_standstill(job):
            status = job.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        note(f"job {job.id} has not ended yet; it continues")
        return exit_status.TIMED_OUT
    if not quiet:
        print(f"{job.id}\t{status.state.value}", flush=True)
    if status.state.value == "failed":
        note(outcome(job.id, status))
    return exit_status.exit_code_of_job(status)
