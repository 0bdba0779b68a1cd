"""`accel cancel JOB…`: cancel jobs and wait until they have ended.

stdout has a line for each job: its id, a tab, its state.

--json  {"jobs": […]}, each in the shape of `accel.cli.output`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import arguments, exit_status
from .output import note, print_json, record_json

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.jobs.handle import Job

    from .arguments import Parser

EXAMPLES = """\
  accel cancel @last
  accel cancel --no-wait 1k2m 1k2n

SIGTERM, the job's grace, SIGKILL. A job that has ended already is no error; what still runs of it is
cancelled."""

KILL_ALLOWANCE_S = 60.0  # after the grace, for the kill and its news to get here


def add_arguments(parser: Parser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="an id, a unique prefix of one, or @last")
    parser.add_argument("--no-wait", action="store_true", help="ask for the end and return")
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    jobs = arguments.find_jobs("accel cancel", args.jobs, args)
    code = exit_status.OK
    cancelled = [
        job for job in jobs if _request_cancel(job)
    ]  # all are asked before any is waited for: their graces run together
    for job in cancelled:
        if not args.no_wait and not _wait_for_end(job):
            code = exit_status.ERROR
        if not args.json:
            print(f"{job.id}\t{job.record.status.state.value}", flush=True)
    if args.json:
        print_json({"jobs": [record_json(job.record) for job in jobs]})
    return code if len(cancelled) == len(jobs) else exit_status.ERROR


def _request_cancel(job: Job) -> bool:
    """Cancel a job. Return False, with a note, if that fails, so that the other jobs are still cancelled."""
    from schedulers.errors import SchedulerError

    try:
        state = job.status(refresh=not job.record.incomplete).state  # of a job that was not sent, that would send it
        if state.final:
            suffix = "; what still ran of it is cancelled" if job.cancel_rest() else ""
            note(f"job {job.id} had already ended: {state.value}{suffix}")
        else:
            job.cancel(wait=False)
        if job.record.warning:
            note(f"warning: job {job.id}: {job.record.warning}")
    except SchedulerError as error:
        note(f"job {job.id} is not cancelled: {error}")
        return False
    return True


def _wait_for_end(job: Job) -> bool:
    try:
        job.wait(job.spec.grace_s + KILL_ALLOWANCE_S)
    except TimeoutError:
        note(f"job {job.id} was told to end and has not; see it: accel status {job.id}")
        return False
    return True
