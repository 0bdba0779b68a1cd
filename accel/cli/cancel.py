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

Sends SIGTERM and, after the job's grace period, SIGKILL. A job that has already ended is no error: its remaining
processes are cancelled."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="job id, unique prefix of an id, or @last")
    parser.add_argument("--no-wait", action="store_true", help="request the cancellation and return")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments.add_job_arguments(parser)


def run(args: Namespace) -> int:
    from schedulers.jobs.handle import refresh

    jobs = arguments.find_jobs("accel cancel", args.jobs, args)
    code = exit_status.OK
    if len(jobs) > 1:
        refresh(jobs)  # one query of each backend for all
    # All requests go out before the first wait, so that the grace periods overlap.
    cancelled = [job for job in jobs if _request_cancel(job, refreshed=len(jobs) > 1)]
    if not args.no_wait and len(jobs) > 1:
        refresh(cancelled)
    for job in cancelled:
        if not args.no_wait and not _wait_for_end(job):
            code = exit_status.ERROR
        if not args.json:
            print(f"{job.id}\t{job.record.status.state.value}", flush=True)
    if args.json:
        print_json({"jobs": [record_json(job.record) for job in jobs]})
    return code if len(cancelled) == len(jobs) else exit_status.ERROR


def _request_cancel(job: Job, *, refreshed: bool) -> bool:
    """Cancel a job. Return False, with a note, if that fails, so that the other jobs are still cancelled."""
    from schedulers.errors import SchedulerError

    try:
        polled = refreshed and not job.record.warning
        state = job.status(refresh=not polled and not job.record.incomplete).state  # a poll would submit an unsent job
        if state.final:
            suffix = "; its remaining processes are cancelled" if job.cancel_rest() else ""
            note(f"job {job.id} had already ended: {state.value}{suffix}")
        elif polled:
            job.request_cancel(refresh=False)
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
        job.wait(job.cancel_timeout_s)
    except TimeoutError:
        note(f"job {job.id} has not ended yet; check it with: accel status {job.id}")
        return False
    return True
