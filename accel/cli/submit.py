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

    from .carried import LaunchDefaults


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
        raise UsageError(parser.prog, "--dry-run runs nothing that --follow could follow: keep one")
    spec = build_spec(args, program, defaults)
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
    _print_warnings(jobs[0].record.plan().warnings)
    if args.json:
        print_json([_summary(job) for job in jobs])
    else:
        print("\n".join(job.id for job in jobs))
    failed = [job for job in jobs if job.record.warning]
    for job in failed:
        note(f"job {job.id}: {job.record.warning}")
    prefix = f"{len(jobs) - len(failed)} of " if failed else ""
    note(f"{prefix}{counted(len(jobs), 'job')} submitted to {args.target}; see them: accel list")
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
    note(f"job {job.id} submitted to {args.target}" + ("" if args.follow else f"; see it: accel logs -f {job.id}"))
    sys.stdout.flush()
    return _follow(job, as_json=args.json) if args.follow else exit_status.OK


def _follow(job: Job, *, as_json: bool) -> int:
    from .logs import LogPrinter, has_many_ranks, print_how_to_stop, report_queue_reason

    printer = LogPrinter(prefix=has_many_ranks(job, None), json=as_json, since=None, flush=True)
    try:
        with report_queue_reason(job):
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
    _add_program(parser.add_argument_group("what to run"))
    _add_placement(parser.add_argument_group("where, and with what"))
    _add_sweep(parser.add_argument_group("many jobs at once"))
    _add_scheduling(parser.add_argument_group("when, and for how long"))
    _add_output(parser.add_argument_group("how to answer"))


def _add_program(group: Group) -> None:
    entry = group.add_mutually_exclusive_group()
    entry.add_argument("-m", "--module", action="store_true", help="the word that follows the options is a module")
    entry.add_argument("--no-python", action="store_true", help="it is a command that is not Python")
    group.add_argument("--name", help="what people call the job (default: the script's name)")
    group.add_argument("--code", metavar="DIR", help="the directory that holds the program (default: this one)")
    setup = "a command that is run once on each node before the ranks, its words as in a shell; repeatable"
    group.add_argument("--setup", metavar="COMMAND", type=arguments.command, **_REPEATABLE, help=setup)
    file = "settings of the launch, from a file that `accel config` writes; --env, --nodes and the like go before it"
    group.add_argument("--config_file", metavar="FILE", help=file)
    variable = "a variable for the job; without a value, the one it has here; repeatable"
    group.add_argument("--env", metavar="NAME[=VALUE]", type=arguments.environment, **_REPEATABLE, help=variable)
    secret = "a variable whose value is read here: env:NAME or file:PATH (kubernetes: secret:NAME/KEY); repeatable"
    group.add_argument("--secret", metavar="NAME=REFERENCE", type=arguments.secret, **_REPEATABLE, help=secret)


def _add_placement(group: Group) -> None:
    group.add_argument("--target", help="a name in accel.yaml, or a kind of target (default: local)")
    nodes = "machines (default: 1, or as --hosts, --hostfile or --config_file says); 2:8 for a world that may grow"
    group.add_argument("--nodes", type=arguments.nodes, metavar="N", help=nodes)
    group.add_argument("--procs-per-node", **_COUNT, help="processes on each (default: one per GPU, or one)")
    group.add_argument("--gpus", **_COUNT, help="GPUs on each node (default: 0, or as a --config_file says)")
    group.add_argument("--cpus", **_COUNT, help="CPU cores on each node")
    group.add_argument("--memory", metavar="SIZE", type=arguments.memory, help="on each node: 512M, 16G (16 means 16G)")
    option = "an option of the target, typed as in accel.yaml; repeatable"
    group.add_argument("--accelerator", metavar="TYPE", help="the type of the GPUs, where the target can choose")
    group.add_argument("--image", metavar="IMAGE", help="a container image, where the target runs one")
    group.add_argument("--option", metavar="KEY=VALUE", type=arguments.target_option, **_REPEATABLE, help=option)
    hosts = "machines of an ssh target: a,b or user@host:port or gpu[01-16], or a pattern of ~/.ssh/config"
    group.add_argument("--hosts", metavar="LIST", help=hosts)
    group.add_argument(
        "--hostfile", metavar="FILE", help="a file with a machine a line (Open MPI's, DeepSpeed's syntax)"
    )
    group.add_argument("--spares", **_COUNT, help="further machines of the ssh target, to replace bad ones")
    group.add_argument("--interface", metavar="NAME", help="the network interface that machines of it meet on")
    group.add_argument("--concurrency", **_COUNT, help="jobs that run at once on a machine (local, ssh); others wait")
    group.add_argument("--snapshot", action="store_true", help="run a copy of the code as it is now (local, slurm)")


def _add_sweep(group: Group) -> None:
    axis = "a job for each value: {NAME} in the arguments, or --NAME VALUE after them; repeatable, all combinations"
    group.add_argument("--sweep", metavar="NAME=V1,V2", type=arguments.axis, **_REPEATABLE, help=axis)
    group.add_argument("--array", metavar="FILE", help="the same from a table: CSV, or YAML with points or a grid")


def _add_scheduling(group: Group) -> None:
    group.add_argument("--after", metavar="JOB", **_REPEATABLE, help="start when this job has succeeded; repeatable")
    group.add_argument("--time-limit", **_TIME, help="for one attempt: 90 (s), 30m, 1h30m")
    group.add_argument("--grace", **_TIME, default=30.0, help="between SIGTERM and SIGKILL (default: 30s)")
    restarts = "how often all ranks are started again after a failure (default: 0)"
    group.add_argument("--max-restarts", **_COUNT, default=0, help=restarts)


def _add_output(group: Group) -> None:
    follow = group.add_mutually_exclusive_group()
    follow.add_argument("--follow", action="store_true", help="print what the job writes and exit with its exit code")
    follow.add_argument("--detach", action="store_true", help="print the job's id and return (the default)")
    dry_help = "print what would be done, and do nothing; =server: and ask the target what it would refuse of it"
    group.add_argument("--dry-run", nargs="?", const="client", choices=("client", "server"), help=dry_help)
    group.add_argument("--json", action="store_true", help="answer in JSON")
