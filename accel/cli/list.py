"""`accel list`: list jobs, the newest first.

Piped, prints a tab-separated line per job without a heading: id, name, state, target, nodes, time of
submission (UTC), message. A job whose files cannot be read has the state `damaged`, and the reason as its
message.

Without a filter, only the jobs shown are read and polled.

With --target, the target is also queried for jobs unknown here, if its kind can list them: jobs of other
machines and of `helm/accel-job`, except an ended one whose id the target has reused since. They are shown but
not stored; `accel status JOB --target NAME` stores one. If the target cannot be queried, or accel.yaml no
longer has it, a line on stderr reports that, and the jobs known here are shown. A target without known jobs
is then an error.

--json  {"jobs": […], "older": N}: each job in the shape of `accel.cli.output`, or {"id", "state":
"damaged", "message"}; `older` counts the jobs that --limit left out. Jobs that only a server knows have "owner".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import arguments, exit_status
from .argv import UsageError
from .output import age, moment, note, print_json, print_rows, record_json

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.store.record import CorruptRecord, Record
    from schedulers.store.store import Store

    from .arguments import Parser

EXAMPLES = """\
  accel list --state running --state queued
  accel list --all --target local | cut -f1,3
  accel list --target cluster                    # also jobs that other machines submitted there"""

STATES = ("submitting", "queued", "running", "succeeded", "failed", "cancelled", "damaged")
COLUMNS: tuple[str, ...] = ("ID", "NAME", "STATE", "TARGET", "NODES", "SUBMITTED", "MESSAGE")


def add_arguments(parser: Parser) -> None:
    state = f"only jobs in state {', '.join(STATES)}; repeatable"
    parser.add_argument("--state", metavar="STATE", choices=STATES, action="append", help=state)
    parser.add_argument("--target", metavar="NAME", help="only jobs of this target, also of other machines")
    option = "with --target: option of the target, typed as in accel.yaml; repeatable"
    parser.add_argument(
        "--option", metavar="KEY=VALUE", type=arguments.target_option, action="append", default=[], help=option
    )
    parser.add_argument("--limit", metavar="N", type=arguments.count, default=50, help="N jobs at most (default: 50)")
    parser.add_argument("--all", action="store_true", help="list all jobs")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    from schedulers.store.record import CorruptRecord

    jobs, older = _select_jobs(args)
    if args.json:
        print_json({"jobs": [_json(job) for job in jobs], "older": older})
        return exit_status.OK
    owners = ["" if isinstance(job, CorruptRecord) else job.owner for job in jobs]
    columns, shown = COLUMNS, [_cells(job, _ago) for job in jobs]
    if any(owners):
        columns = (*COLUMNS[:-1], "OWNER", COLUMNS[-1])
        shown = [(*cells[:-1], owner, cells[-1]) for cells, owner in zip(shown, owners, strict=True)]
    print_rows(columns, (_cells(job, moment) for job in jobs), on_terminal=shown)
    for warning in dict.fromkeys(job.warning for job in jobs if not isinstance(job, CorruptRecord) and job.warning):
        note(f"warning: {warning}")
    unknown = [job.id for job in jobs if not isinstance(job, CorruptRecord) and not job.path]
    if unknown:
        singular = f"1 job is not recorded here; record it: accel status {unknown[0]}"
        plural = f"{len(unknown)} jobs are not recorded here; record one: accel status JOB"
        note(f"{singular if len(unknown) == 1 else plural} --target {args.target}")
    if older:
        note(f"{older} older jobs are not shown (--all)")
    return exit_status.OK


def _select_jobs(args: Namespace) -> tuple[list[Record | CorruptRecord], int]:
    """Return the jobs to show and the number of older ones left out."""
    from schedulers.jobs.handle import list_jobs
    from schedulers.store.store import Store

    store = Store.default()
    limit = None if args.all else max(0, args.limit)
    if args.option and args.target is None:
        raise UsageError("accel list", "--option needs --target NAME")
    if args.state or args.target is not None:
        by_id = {job.id: job for job in list_jobs(store=store)}
        by_id |= {job.id: job for job in _elsewhere(args, store, by_id)}
        jobs = [job for job in by_id.values() if _matches(job, args)]
        jobs.sort(key=_created_at, reverse=True)
        return jobs[:limit], len(jobs) - len(jobs[:limit])
    ids = store.ids()
    return list_jobs(store=store, ids=ids[:limit]), len(ids) - len(ids[:limit])


def _elsewhere(args: Namespace, store: Store, by_id: Mapping[str, Record | CorruptRecord]) -> list[Record]:
    """Return the jobs that the --target knows and this machine does not. `by_id`: this machine's, by id.

    Raises SpecError and ConfigError for invalid options, and for a target that is entirely unknown.
    """
    from schedulers.errors import ConfigError, SchedulerError, SpecError
    from schedulers.jobs.attach import jobs_elsewhere
    from schedulers.store.record import CorruptRecord

    if args.target is None:
        return []
    options = arguments.target_options("accel list", args)
    try:
        return jobs_elsewhere(args.target, store, by_id, options)
    except SchedulerError as error:
        targets = {job.target for job in by_id.values() if not isinstance(job, CorruptRecord)}
        if isinstance(error, SpecError | ConfigError) and (args.option or args.target not in targets):
            raise
        note(f"warning: jobs of other machines are not listed: {error}")
        return []


def _created_at(job: Record | CorruptRecord) -> float:
    from schedulers.store.record import CorruptRecord
    from schedulers.store.store import created_at

    return created_at(job.id) if isinstance(job, CorruptRecord) else job.created_at


def _matches(job: Record | CorruptRecord, args: Namespace) -> bool:
    from schedulers.store.record import CorruptRecord

    if isinstance(job, CorruptRecord):
        return args.target is None and (not args.state or "damaged" in args.state)
    return args.target in (None, job.target) and (not args.state or job.status.state.value in args.state)


def _json(job: Record | CorruptRecord) -> dict[str, Any]:
    from schedulers.store.record import CorruptRecord

    if isinstance(job, CorruptRecord):
        return {"id": job.id, "state": "damaged", "message": job.reason}
    return record_json(job)


def _cells(job: Record | CorruptRecord, format_time: Callable[[float], str]) -> tuple[str, ...]:
    from schedulers.store.record import CorruptRecord

    if isinstance(job, CorruptRecord):
        return job.id, "", "damaged", "", "", "", job.reason
    status = job.status
    return job.id, job.name, status.state.value, job.target, str(job.nodes), format_time(job.created_at), status.message


def _ago(seconds: float) -> str:
    return f"{age(time.time() - seconds)} ago"
