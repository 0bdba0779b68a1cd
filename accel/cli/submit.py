"""`accel submit`: run a script, module or command as a job on a target.

stdout holds only the job's id; with --follow, the job's output instead (and the id is on stderr).

--json            {"id", "name", "target", "kind", "native_id"}; for a sweep, a list of these
--dry-run --json  the plan: {"target", "kind", "job_id", "files", "actions", "settings", "warnings", "source"};
                  with =server also "refused": a line for each problem that the target reports
--follow --json   a line each: the id as above, `accel logs --json`, `accel status --json`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import arguments, exit_status
from .arguments import Parser
from .argv import UsageError
from .output import counted, note, outcome, print_json, progress, record_json

if TYPE_CHECKING:
    from argparse import Namespace
    from argparse import _ArgumentGroup as Group

    from schedulers.config.named_targets import ResolvedTarget
    from schedulers.job import JobSpec
    from schedulers.jobs.handle import Job
    from schedulers.target import Plan

    from .launch_defaults import LaunchDefaults


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

Arguments after the script belong to the script. --follow exits with the job's exit code (143: cancelled)."""

DRY_RUN_ID = "dry-run"


def run_argv(argv: Sequence[str], defaults: LaunchDefaults | None = None) -> int:
    """Parse the options before the script and submit the job or sweep.

    defaults: settings that `accel launch` has read from a configuration file.
    """
    from . import COMMANDS
    from .submit_spec import build_spec, build_sweep

    parser = Parser("submit", COMMANDS["submit"][1], EXAMPLES, usage=USAGE)
    add_arguments(parser)
    args, program = parser.read_before_script(argv)
    if args.dry_run and args.follow:
        raise UsageError(parser.prog, "--dry-run and --follow contradict each other: keep one")
    spec = build_spec(args, program, defaults)
    jobs = build_sweep(args, spec)
    if jobs:
        return _show_plans(jobs, args) if args.dry_run else _submit_sweep(jobs, args)
    if args.dry_run:
        return _show_plan(spec, args)
    return _submit(spec, args)


def _show_plan(spec: JobSpec, args: Namespace) -> int:
    # The two lines of `schedulers.dry_run`, without importing the module of job handles.
    from schedulers.jobs.submit import prepare
    from schedulers.store.store import Store

    resolved, spec = prepare(spec, args.target, Store.default(), start=None)
    plan = resolved.plan(spec, DRY_RUN_ID)
    problems = _review(resolved, plan) if args.dry_run == "server" else None
    if args.json:
        print_json(plan.to_json() | ({} if problems is None else {"refused": problems}))
    else:
        print(plan, end="")
    if problems is None:
        return exit_status.OK
    sys.stdout.flush()
    for line in problems:
        note(line)
    if not problems:
        note(f"{args.target} would accept the job")
    return exit_status.ERROR if problems else exit_status.OK


def _review(resolved: ResolvedTarget, plan: Plan) -> list[str]:
    from schedulers.target import SupportsReview, kinds_with

    if not isinstance(resolved.target, SupportsReview):
        raise UsageError(
            "accel submit",
            f"--dry-run=server is not supported by {resolved.kind} targets (supported by: {kinds_with('review')}): "
            "use --dry-run",
        )
    with progress():
        return resolved.target.review(plan)


def _show_plans(jobs: Sequence[JobSpec], args: Namespace) -> int:
    if args.dry_run == "server":
        raise UsageError("accel submit", "--dry-run=server does not support sweeps: check one job")
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
    _print_warnings(jobs[0].record.plan().warnings)
    if args.json:
        print_json([_summary(job) for job in jobs])
    else:
        print("\n".join(job.id for job in jobs))
    failed = [job for job in jobs if job.record.warning]
    for job in failed:
        note(f"job {job.id}: {job.record.warning}")
    prefix = f"{len(jobs) - len(failed)} of " if failed else ""
    note(f"{prefix}{counted(len(jobs), 'job')} submitted to {args.target}; list them: accel list")
    return exit_status.ERROR if failed else exit_status.OK


def _submit(spec: JobSpec, args: Namespace) -> int:
    from schedulers.jobs.handle import submit_spec

    with progress():
        job = submit_spec(spec, args.target)
    _print_warnings(job.record.plan().warnings)
    if args.json:
        print_json(_summary(job), one_line=args.follow)
    elif not args.follow:
        print(job.id)
    note(f"job {job.id} submitted to {args.target}" + ("" if args.follow else f"; follow it: accel logs -f {job.id}"))
    sys.stdout.flush()
    return _follow(job, as_json=args.json) if args.follow else exit_status.OK


def _follow(job: Job, *, as_json: bool) -> int:
    from .logs import LogPrinter, has_many_ranks, print_how_to_stop, report_standstill

    printer = LogPrinter(prefix=has_many_ranks(job, None), json=as_json, since=None, flush=True)
    try:
        with report_standstill(job):
            printer.print(job.logs(follow=True))
            status = job.wait()
    except KeyboardInterrupt:
        print_how_to_stop(job)
        return exit_status.INTERRUPTED
    if as_json:
        print_json(record_json(job.record), one_line=True)
    note(outcome(job.id, status))
    return exit_status.exit_code_of_job(status)


def _summary(job: Job) -> dict[str, Any]:
    record = job.record
    return {
        "id": job.id,
        "name": record.name,
        "target": record.target,
        "kind": record.kind,
        "native_id": record.native_id,
    }


def _print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        note(f"warning: {warning}")


# Options.

_REPEATABLE: dict[str, Any] = {"action": "append", "default": []}
_COUNT: dict[str, Any] = {"type": arguments.integer, "metavar": "N"}
_TIME: dict[str, Any] = {"type": arguments.duration, "metavar": "TIME"}


def add_arguments(parser: Parser) -> None:
    _add_program(parser.add_argument_group("program"))
    _add_placement(parser.add_argument_group("target and resources"))
    _add_sweep(parser.add_argument_group("sweeps"))
    _add_scheduling(parser.add_argument_group("time and restarts"))
    _add_output(parser.add_argument_group("output"))


def _add_program(group: Group) -> None:
    entry = group.add_mutually_exclusive_group()
    entry.add_argument("-m", "--module", action="store_true", help="run a Python module, as `python -m`")
    entry.add_argument("--no-python", action="store_true", help="run a command that is not Python")
    group.add_argument("--name", help="name of the job (default: the script's name)")
    group.add_argument("--code", metavar="DIR", help="directory of the code (default: the current one)")
    setup = "command to run once on each node before the ranks, quoted as in a shell; repeatable"
    group.add_argument("--setup", metavar="COMMAND", type=arguments.command, **_REPEATABLE, help=setup)
    file = "launch settings, a file that `accel config` writes; flags such as --env and --nodes override it"
    group.add_argument("--config_file", metavar="FILE", help=file)
    variable = "environment variable for the job; without a value, its value here; repeatable"
    group.add_argument("--env", metavar="NAME[=VALUE]", type=arguments.environment, **_REPEATABLE, help=variable)
    secret = (
        "secret variable, read here from env:NAME or file:PATH (kubernetes: secret:NAME/KEY; sagemaker: "
        "secretsmanager:ID[#KEY] or ssm:NAME); repeatable"
    )
    group.add_argument("--secret", metavar="NAME=REFERENCE", type=arguments.secret, **_REPEATABLE, help=secret)


def _add_placement(group: Group) -> None:
    target = "name in accel.yaml, SERVER/NAME, or a kind of target (default: the target of `accel context`, else local)"
    group.add_argument("--target", help=target)
    nodes = "number of nodes (default: from --hosts, --hostfile or --config_file, else 1); 2:8 for an elastic job"
    group.add_argument("--nodes", type=arguments.nodes, metavar="N", help=nodes)
    group.add_argument("--procs-per-node", **_COUNT, help="processes per node (default: one per GPU, or 1)")
    group.add_argument("--gpus", **_COUNT, help="GPUs per node (default: from --config_file, else 0)")
    group.add_argument("--cpus", **_COUNT, help="CPU cores per node")
    group.add_argument("--memory", metavar="SIZE", type=arguments.memory, help="memory per node: 512M, 16G (16 is 16G)")
    option = "option of the target, typed as in accel.yaml; repeatable"
    group.add_argument("--accelerator", metavar="TYPE", help="type of the GPUs, if the target offers several")
    group.add_argument("--image", metavar="IMAGE", help="container image, if the target runs one")
    group.add_argument("--option", metavar="KEY=VALUE", type=arguments.target_option, **_REPEATABLE, help=option)
    hosts = "hosts of an ssh target: a,b or user@host:port or gpu[01-16], or a pattern of ~/.ssh/config"
    group.add_argument("--hosts", metavar="LIST", help=hosts)
    group.add_argument(
        "--hostfile", metavar="FILE", help="hosts of an ssh target, one per line (Open MPI's or DeepSpeed's syntax)"
    )
    group.add_argument("--spares", **_COUNT, help="spare hosts of an ssh target, to replace lost ones")
    group.add_argument("--interface", metavar="NAME", help="network interface between the hosts of an ssh target")
    group.add_argument(
        "--concurrency", **_COUNT, help="jobs that run at once on a machine (local, ssh, tpu); others queue"
    )
    group.add_argument("--snapshot", action="store_true", help="run a copy of the code as it is now (local, slurm)")


def _add_sweep(group: Group) -> None:
    axis = "submit a job per value: {NAME} in the arguments, or --NAME VALUE after them; repeatable, all combinations"
    group.add_argument("--sweep", metavar="NAME=V1,V2", type=arguments.axis, **_REPEATABLE, help=axis)
    group.add_argument("--array", metavar="FILE", help="submit a job per row of a CSV file, or point of a YAML file")


def _add_scheduling(group: Group) -> None:
    group.add_argument("--after", metavar="JOB", **_REPEATABLE, help="start after this job has succeeded; repeatable")
    group.add_argument("--time-limit", **_TIME, help="limit of one attempt: 90 (s), 30m, 1h30m (default: none)")
    group.add_argument("--grace", **_TIME, default=30.0, help="grace period between SIGTERM and SIGKILL (default: 30s)")
    restarts = "restarts of all ranks after a failure (default: 0)"
    group.add_argument("--max-restarts", **_COUNT, default=0, help=restarts)


def _add_output(group: Group) -> None:
    follow = group.add_mutually_exclusive_group()
    follow.add_argument("--follow", action="store_true", help="follow the logs and exit with the job's exit code")
    follow.add_argument("--detach", action="store_true", help="print the job's id and return (default)")
    dry_help = "print the plan without submitting; =server: the target validates it too"
    group.add_argument("--dry-run", nargs="?", const="client", choices=("client", "server"), help=dry_help)
    group.add_argument("--json", action="store_true", help="print JSON")
