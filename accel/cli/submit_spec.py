"""The job that a command line of `accel submit` describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from schedulers.store import paths

from .argv import UsageError
from .launch_defaults import LaunchDefaults

if TYPE_CHECKING:
    from argparse import Namespace

    from schedulers.job import Entry, JobSpec


def build_spec(args: Namespace, program: Sequence[str], defaults: LaunchDefaults | None = None) -> JobSpec:
    """Return the job of the command line and its configuration file. Sets `args.target`.

    Raises UsageError or SpecError; reads files, changes none.
    """
    from schedulers.job import JobSpec, Resources, Retry
    from schedulers.jobs.submit import default_name, places

    entry: Entry = "module" if args.module else "command" if args.no_python else "script"
    if not program:
        raise UsageError("accel submit", "nothing to run: give a script, -m MODULE, or --no-python COMMAND")
    code, workdir = places(os.getcwd(), args.code, explicit=False)
    if not os.path.isdir(code):
        raise UsageError("accel submit", f"--code: directory {code} does not exist")
    if defaults is None:
        defaults = _launch_defaults(args, program[0] if entry == "script" and args.code is None else "")
    args.target = _target(args, defaults)
    nodes = _nodes(args, defaults)
    gpus = defaults.gpus if args.gpus is None else args.gpus
    return JobSpec(
        argv=tuple(program),
        entry=entry,
        name=(defaults.name or default_name(program[0], entry)) if args.name is None else args.name,
        nodes=nodes[0],
        max_nodes=nodes[1],
        procs_per_node=args.procs_per_node or defaults.procs_per_node,
        resources=Resources(gpus=gpus or 0, cpus=args.cpus, memory_gb=args.memory, accelerator=args.accelerator),
        image=args.image,
        env=defaults.env | merge_unique("--env", args.env),
        secrets=merge_unique("--secret", args.secret),
        code=code,
        workdir=workdir,
        setup=tuple(args.setup),
        time_limit_s=defaults.time_limit_s if args.time_limit is None else args.time_limit,
        grace_s=args.grace,
        retry=Retry(max_restarts=args.max_restarts),
        after=tuple(args.after),
        options={**defaults.options, **_target_options(args)},
    )


def _launch_defaults(args: Namespace, script: str) -> LaunchDefaults:
    from . import submit_config
    from .output import note

    if args.config_file is None:
        return LaunchDefaults({})
    defaults = submit_config.from_config_file(args.config_file, script)
    for line in defaults.notes:
        note(line)
    return defaults


def _target(args: Namespace, defaults: LaunchDefaults) -> str:
    """Return the target: --target, else the file's kind, else the target of `accel context`, else `local`.

    Raises UsageError if --target and the file contradict.
    """
    if args.target is None and defaults.kind is None:
        return _current_target() or "local"
    if args.target is None or defaults.kind is None:
        return str(args.target or defaults.kind)
    from schedulers.config.named_targets import known_targets

    kind = next((entry.kind for entry in known_targets() if entry.name == args.target), defaults.kind)
    if kind != defaults.kind:
        problem = f"is for a {defaults.kind} target, and {args.target} is of kind {kind}"
        raise UsageError("accel submit", f"--config_file {args.config_file} {problem}")
    return str(args.target)


def _current_target() -> str | None:
    if not os.path.isfile(paths.servers_file()):  # most users have no server, and its modules take a while to import
        return None
    from schedulers.config.servers import read_servers

    return read_servers().current_target


def build_sweep(args: Namespace, spec: JobSpec) -> list[JobSpec]:
    """Return the jobs of a sweep, or none without one. Raises UsageError, SpecError."""
    if not args.sweep and args.array is None:
        return []
    if args.sweep and args.array is not None:
        raise UsageError("accel submit", "--sweep and --array contradict each other: keep one")
    if args.follow:
        raise UsageError("accel submit", "--follow follows one job; submit the sweep, then accel logs -f JOB")
    from schedulers import sweeps

    points = sweeps.read(args.array) if args.array is not None else sweeps.grid(merge_unique("--sweep", args.sweep))
    return sweeps.specs(spec, points)


def merge_unique(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a mapping. Raises UsageError for a key with two different values."""
    merged: dict[str, Any] = {}
    for key, value in pairs:
        if merged.setdefault(key, value) != value:
            raise UsageError("accel submit", f"{option} sets {key} twice, to different values: keep one")
    return merged


def _nodes(args: Namespace, defaults: LaunchDefaults) -> tuple[int, int | None]:
    """Return the minimum number of nodes, and the maximum of an elastic job.

    From --nodes, else all machines on the command line except the spares, else from the file.
    """
    if args.nodes is not None:
        return int(args.nodes[0]), args.nodes[1]
    if args.hosts is None and args.hostfile is None:
        return defaults.nodes or (1, None)
    count = _machine_count(args)
    spares, option = _spares(args)
    if count <= spares:
        hosts = f"{count} host{'s' if count > 1 else ''}"
        raise UsageError("accel submit", f"{option} leaves none of the {hosts} to run on")
    return count - spares, None


def _machine_count(args: Namespace) -> int:
    """Return the number of machines on the command line."""
    from schedulers.errors import ConfigError, SpecError
    from schedulers.hosts.host_list import parse_hosts, read_hostfile

    if args.hostfile is None and ("*" in args.hosts or "?" in args.hosts):
        raise UsageError("accel submit", f"--hosts {args.hosts} is a pattern: give the number of nodes with --nodes")
    try:
        return len(parse_hosts(args.hosts) if args.hostfile is None else read_hostfile(args.hostfile))
    except (ConfigError, SpecError) as error:
        raise UsageError("accel submit", str(error)) from None


def _spares(args: Namespace) -> tuple[int, str]:
    """Return the number of spare machines, from the command line or the target, and where it is set."""
    if args.spares is not None:
        return args.spares, f"--spares {args.spares}"
    from schedulers.config.named_targets import resolve_target
    from schedulers.store.store import Store

    target = resolve_target(args.target, Store.default().jobs, overrides=_target_options(args))
    spares = int(target.options.get("spares", 0))
    return spares, f"spares: {spares} of target {args.target}"


def _host_options(args: Namespace) -> Iterator[tuple[str, Any]]:
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("accel submit", "--hosts and --hostfile contradict each other: keep one")
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
    return merge_unique("--option", pairs)
