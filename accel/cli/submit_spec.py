"""The job that a command line of `accel submit` describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.job import Entry, JobSpec


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
    return JobSpec(
        argv=tuple(program),
        entry=entry,
        name=args.name or default_name(program[0], entry),
        nodes=args.nodes,
        procs_per_node=args.procs_per_node,
        resources=Resources(gpus=args.gpus, cpus=args.cpus, memory_gb=args.memory),
        env=_once("--env", args.env),
        secrets=_once("--secret", args.secret),
        code=code,
        workdir=workdir,
        time_limit_s=args.time_limit,
        grace_s=args.grace,
        retry=Retry(max_restarts=args.max_restarts),
        after=tuple(args.after),
        options=_target_options(args),
    )


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


def _target_options(args: Namespace) -> dict[str, Any]:
    pairs = list(args.option)
    if args.concurrency is not None:
        pairs.append(("concurrency", args.concurrency))
    if args.snapshot:
        pairs.append(("snapshot", True))
    return _once("--option", pairs)
