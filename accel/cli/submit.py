"""`accel submit`: run a script, module or command as a job on a target.

stdout holds only the job's id; with --follow, the job's output instead (and the id is on stderr).

--json            {"id", "name", "target", "kind", "native_id"}; for a sweep, a list of these --dry-run --json
the plan: {"target", "kind", "job_id", "files", "actions", "settings", "warnings", "source"}; with =server
also "refused": a line for each problem that the target reports --follow --json   a line each: the first of
these, the lines of `accel logs --json`, then that of `accel status --json`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import exit_status
from .argv import UsageError
from .output import counted, note, print_json, progress

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.config.named_targets import ResolvedTarget
    from schedulers.job import JobSpec
    from schedulers.jobs.handle import Job
    from schedulers.target import Plan

    from .carried import Carried

USAGE = """accel submit [OPTIONS] SCRIPT [ARGUMENTS]
       accel submit [OPTIONS] -m MODULE [ARGUMENTS]
       accel submit [OPTIONS] --no-python COMMAND [ARGUMENTS]"""

EXAMPLES = """\
  accel submit train.py --lr 1e-3
  accel submit --procs-per-node 2 --follow train.py
  accel submit --target local --time-limit 2h --max-restarts 3 --env SEED=1 -m my.training --epochs 10
  accel submit --sweep lr=1e-3,1e-4 --sweep seed=1,2,3 train.py --epochs 10
  accel submit --dry-run --json --no-python nvidia-smi -L
  accel submit --target cluster --nodes 2 --dry-run=server train.py

All that follows the script belongs to the script. --follow exits with the job's exit code (143: cancelled)."""

DRY_RUN_ID = "dry-run"


def run_argv(argv: Sequence[str], carried: Carried | None = None) -> int:
    """Parse the options before the script and submit the job or sweep.

    carried: settings that `accel launch` has read from a configuration file.
    """
    from . import COMMANDS
    from .parser import Parser
    from .submit_options import add_arguments
    from .submit_spec import build_spec, build_sweep

    parser = Parser("submit", COMMANDS["submit"][1], EXAMPLES, usage=USAGE)
    add_arguments(parser)
    args, program = parser.read_before_script(argv)
    if args.dry_run and args.follow:
        raise UsageError(parser.prog, "--dry-run runs nothing that --follow could follow: keep one")
    spec = build_spec(args, program, carried)
    jobs = build_sweep(args, spec)
    if jobs:
        return _show_plans(jobs, args) if args.dry_run else _submit_sweep(jobs, args)
    if args.dry_run:
        return _show_plan(spec, args)
    return _submit(spec, args)


def _show_plan(spec: JobSpec, args: Namespace) -> int:
    # The two lines of `schedulers.dry_run`, without its module: that of handles on jobs, which a dry run has none of.
    from schedulers.jobs.submit import prepare
    from schedulers.store.store import Store

    resolved, spec = prepare(spec, args.target, Store.default(), start=None)
    plan = resolved.plan(spec, DRY_RUN_ID)
    refused = _review(resolved, plan) if args.dry_run == "server" else None
    if args.json:
        print_json(plan.to_json() | ({} if refused is None else {"refused": refused}))
    else:
        print(plan, end="")
    if refused is None:
        return exit_status.OK
    sys.stdout.flush()
    for line in refused:
        note(line)
    if not refused:
        note(f"{args.target} would take it")
    return exit_status.ERROR if refused else exit_status.OK


def _review(resolved: ResolvedTarget, plan: Plan) -> list[str]:
    from schedulers.target import Reviews, kinds_with

    if not isinstance(resolved.target, Reviews):
        raise UsageError(
            "accel submit",
            f"--dry-run=server: a {resolved.kind} target has nobody to ask (kinds that have: {kinds_with('review')}); "
            "--dry-run asks nobody",
        )
    with progress():
        return resolved.target.review(plan)


def _show_plans(jobs: Sequence[JobSpec], args: Namespace) -> int:
    if args.dry_run == "server":
        raise UsageError("accel submit", "--dry-run=server asks about one job; ask about one of the sweep's")
    from schedulers import sweeps

    plans = sweeps.plans(jobs, args.target, [f"{DRY_RUN_ID}-{number}" for number in range(len(jobs))])
    if args.json:
        print_json([plan.to_json() for plan in plans])
    else:
        print("\n".join(str(plan) for plan in plans), end="")
    return exit_status.OK


def _submit_sweep(specs: Sequence[JobSpec], args: Namespace) -> int:
    from schedulers import sweeps

    with progress():
        jobs = sweeps.submit_sweep(specs, args.target)
    _say_warnings(jobs[0].record.plan().warnings)
    if args.json:
        print_json([_summary(job) for job in jobs])
    else:
        print("\n".join(job.id for job in jobs))
    failed = [job for job in jobs if job.record.warning]
    for job in failed:
        note(f"job {job.id}: {job.record.warning}")
    of = f"{len(jobs) - len(failed)} of " if failed else ""
    note(f"{of}{counted(len(jobs), 'job')} submitted to {args.target}; see them: accel list")
    return exit_status.ERROR if failed else exit_status.OK


def _submit(spec: JobSpec, args: Namespace) -> int:
    from schedulers.jobs.handle import submit_spec

    with progress():
        job = submit_spec(spec, args.target)
    _say_warnings(job.record.plan().warnings)
    if args.json:
        print_json(_summary(job), one_line=args.follow)
    elif not args.follow:
        print(job.id)
    note(f"job {job.id} submitted to {args.target}" + ("" if args.follow else f"; see it: accel logs -f {job.id}"))
    sys.stdout.flush()
    return _follow(job, as_json=args.json) if args.follow else exit_status.OK


def _follow(job: Job, *, as_json: bool) -> int:
    from .job_format import outcome, record_json
    from .stream import LogPrinter, has_many_ranks, say_how_to_stop, why_it_waits

    printer = LogPrinter(prefix=has_many_ranks(job, None), json=as_json, since=None, flush=True)
    try:
        with why_it_waits(job):
            printer.print(job.logs(follow=True))
            status = job.wait()
    except KeyboardInterrupt:
        say_how_to_stop(job)
        return exit_status.INTERRUPTED
    if as_json:
        print_json(record_json(job.record), one_line=True)
    note(outcome(job.id, status))
    return exit_status.of_job(status)


def _summary(job: Job) -> dict[str, Any]:
    record = job.record
    return {
        "id": job.id,
        "name": record.name,
        "target": record.target,
        "kind": record.kind,
        "native_id": record.native_id,
    }


def _say_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        note(f"warning: {warning}")
