"""The job that a command line of `accel submit` describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.job import Entry, JobSpec

    from .submit_settings import Carried


def build_spec(args: Namespace, program: Sequence[str]) -> JobSpec:
    """The job that the command line describes. Raises UsageError or SpecError; looks at files, changes none."""
    from schedulers.job import JobSpec, Resources, Retry
    from schedulers.submitting import default_name, places

    entry: Entry = "module" if args.module else "command" if args.no_python else "script"
    if not program:
        raise UsageError("accel submit", "nothing to run: give a script, -m MODULE, or --no-python COMMAND")
    code, workdir = places(os.getcwd(), args.code, explicit=False)
    if not os.path.isdir(code):
        raise UsageError("accel submit", f"--code: no directory {code}")
    if entry == "script":
        _check_script(program[0], os.path.join(code, workdir))
    carried = _carried(args)
    return JobSpec(
        argv=tuple(program),
        entry=entry,
        name=args.name or default_name(program[0], entry),
        nodes=_nodes(args),
        max_nodes=args.nodes[1] if args.nodes else None,
        procs_per_node=args.procs_per_node or carried.procs_per_node,
        resources=Resources(gpus=args.gpus, cpus=args.cpus, memory_gb=args.memory, accelerator=args.accelerator),
        image=args.image,
        env=carried.env | _once("--env", args.env),
        secrets=_once("--secret", args.secret),
        code=code,
        workdir=workdir,
        setup=tuple(args.setup),
        time_limit_s=args.time_limit,
        grace_s=args.grace,
        retry=Retry(max_restarts=args.max_restarts),
        after=tuple(args.after),
        options=_target_options(args),
    )


def _carried(args: Namespace) -> Carried:
    from . import submit_settings

    return submit_settings.Carried({}, None) if args.config_file is None else submit_settings.of_file(args.config_file)


def build_sweep(args: Namespace, spec: JobSpec) -> list[JobSpec]:
    """The jobs of a sweep, or none where no sweep is asked for. Raises UsageError, SpecError."""
    if not args.sweep and args.array is None:
        return []
    if args.sweep and args.array is not None:
        raise UsageError("accel submit", "--sweep and --array both say which jobs: keep one")
    if args.follow:
        raise UsageError("accel submit", "--follow follows one job; submit the sweep, then accel logs -f JOB")
    from schedulers import sweeps

    points = sweeps.read(args.array) if args.array is not None else sweeps.grid(_once("--sweep", args.sweep))
    return sweeps.specs(spec, points)


def _check_script(script: str, directory: str) -> None:
    from schedulers.errors import SpecError

    path = os.path.join(directory, script)
    if not script or "\0" in script or os.path.isfile(path) or os.path.isfile(os.path.join(path, "__main__.py")):
        return  # JobSpec refuses the first two
    what = "it is a directory without __main__.py" if os.path.isdir(path) else "it does not exist"
    hint = "a module: -m; a command that is not Python: --no-python"
    raise SpecError(f"no script at {os.path.normpath(path)}: {what} ({hint})")


def _once(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs as a mapping. The same key with two values is a mistake that must not be settled silently."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise UsageError("accel submit", f"{option} gives {key} twice, with two values: keep one")
    return found


def _nodes(args: Namespace) -> int:
    """As many as asked for; else all the machines that the command line names, but for the spares."""
    if args.nodes is not None or (args.hosts is None and args.hostfile is None):
        return 1 if args.nodes is None else int(args.nodes[0])
    from schedulers.remote.hosts import parse_hostfile, parse_hosts

    if args.hostfile is not None:
        with open(args.hostfile, encoding="utf-8", errors="surrogateescape") as file:
            count = len(parse_hostfile(file.read(), args.hostfile))
    elif "*" in args.hosts or "?" in args.hosts:
        raise UsageError("accel submit", f"--hosts {args.hosts} is a pattern: say how many of them with --nodes")
    else:
        count = len(parse_hosts(args.hosts))
    spares = args.spares or 0
    if count <= spares:
        raise UsageError("accel submit", f"--spares {spares} leaves none of the {count} hosts to run on")
    return count - spares


def _host_options(args: Namespace) -> Iterator[tuple[str, Any]]:
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("accel submit", "--hosts and --hostfile both say where: keep one")
    if args.hosts is not None:
        yield from (("hosts", args.hosts), ("hostfile", None))
    if args.hostfile is not None:
        yield from (("hostfile", os.path.abspath(args.hostfile)), ("hosts", None))
    if args.spares is not None:
        yield "spares", args.spares
    if args.interface is not None:
        yield "interface", args.interface


def _target_options(args: Namespace) -> dict[str, Any]:
    pairs = [*args.option, *_host_options(args)]
    if args.concurrency is not None:
        pairs.append(("concurrency", args.concurrency))
    if args.snapshot:
        pairs.append(("snapshot", True))
    return _once("--option", pairs)
