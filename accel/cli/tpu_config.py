"""`accel tpu-config`: run commands on every worker of a TPU VM at the same time, over `gcloud`.

The workers' stdout and stderr go to this process's, each line after `[worker N]`. A worker stops at its first
failing command, the others are then stopped, and the exit code is that command's.

--debug  prints the `gcloud` line that runs the same on all workers, quoted for a shell, and runs nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import exit_status
from .argv import UsageError
from .output import note

if TYPE_CHECKING:
    from argparse import Namespace

    from .arguments import Parser

EXAMPLES = """\
  accel tpu-config --tpu_name pod1 --tpu_zone us-central2-b --command "pip list"
  accel tpu-config --command "cd /data" "python fetch.py" --install_accelerate
  accel tpu-config --command_file setup.sh --debug"""

GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm")
_COMMAND = "accel tpu-config"
_FIRST = "cd /usr/share"  # readable by all users of a worker, as in Accelerate
_DEV = "git+https://github.com/huggingface/accelerate.git"
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d+)*", re.ASCII)


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("TPU")
    group.add_argument("--config_file", metavar="FILE", help="configuration file (default: the one in use)")
    name_help = "name of a TPU VM, or of a tpu target, to use its transport (default: from the configuration file)"
    group.add_argument("--tpu_name", metavar="NAME", help=name_help)
    group.add_argument("--tpu_zone", metavar="ZONE", help="zone of the TPU VM (default: from the configuration file)")
    group.add_argument("--use_alpha", action="store_true", help="run `gcloud alpha` instead of `gcloud`")
    group = parser.add_argument_group("commands")
    line = "commands to run, each in quotes; repeatable"
    group.add_argument("--command", metavar="COMMAND", nargs="+", action="extend", help=line)
    group.add_argument("--command_file", metavar="FILE", help="file with one command per line")
    group.add_argument("--install_accelerate", action="store_true", help="run pip install accelerate first")
    version = "version of Accelerate: latest, dev or a number (default: latest)"
    group.add_argument("--accelerate_version", metavar="VERSION", default="latest", help=version)
    group.add_argument("--debug", action="store_true", help="print what would be run, run nothing")


def run(args: Namespace) -> int:
    from accel.launch.tpu import pod

    name, zone, commands = _settings(args)
    commands = [_FIRST, *([_install(args.accelerate_version)] if args.install_accelerate else []), *commands]
    gcloud = [GCLOUD[0], *(["alpha"] if args.use_alpha else []), *GCLOUD[1:]]
    try:
        if zone is None:
            return run_by_target(name, lambda python: commands, debug=args.debug)
        if args.debug:
            print(shlex.join(pod.ssh(gcloud, name, zone, "all", commands)))
            return exit_status.OK
        return pod.run(gcloud, name, zone, commands)
    except pod.PodError as error:
        note(f"tpu-config: {error}")
        return exit_status.ERROR


def run_by_target(name: str, commands: Callable[[str], list[str]], *, debug: bool = False) -> int:
    """Run the commands on the slice of a target, over its own transport. Raises PodError.

    `commands` is called with the interpreter on the hosts.
    """
    from accel.launch.tpu import pod
    from schedulers.config.named_targets import load_target
    from schedulers.errors import SchedulerError
    from schedulers.store.store import Store
    from schedulers.tpu.slice_target import SliceTarget

    try:
        target = load_target(name, Store.default().jobs)
        assert isinstance(target, SliceTarget)
        config, hosts = target.config()
    except SchedulerError as error:
        raise pod.PodError(str(error)) from None
    script = pod.script(commands(target.python))
    lines = [["ssh", "-F", str(config), "-o", "BatchMode=yes", host.name, script] for host in hosts]
    if debug:
        print("\n".join(map(shlex.join, lines)))
        return exit_status.OK
    return pod.on_each(lambda signals: lines)


def is_target(command: str, name: str) -> bool:
    """Return True if accel.yaml has a tpu target of that name. Raises UsageError for `command`."""
    from schedulers.config.named_targets import known_targets
    from schedulers.errors import ConfigError

    try:
        return any(entry.name == name and entry.kind == "tpu" and entry.file is not None for entry in known_targets())
    except ConfigError as error:
        raise UsageError(command, str(error)) from None


def _settings(args: Namespace) -> tuple[str, str | None, list[str]]:
    """Return name, zone and commands, from flags first, then the file.

    The zone is None if the name is a target's. Raises UsageError.
    """
    from .launch_file import active_path, default_path, read_file

    if args.command and args.command_file:
        raise UsageError(_COMMAND, "--command and --command_file contradict each other: keep one")
    path = active_path(args.config_file)
    entries = {} if path is None else read_file(_COMMAND, path).entries
    settings: dict[str, Any] = {key: entry.value for key, entry in entries.items()}
    name = args.tpu_name or settings.get("tpu_name", "")
    zone = args.tpu_zone or settings.get("tpu_zone", "")
    if args.tpu_name and not args.tpu_zone and is_target(_COMMAND, name):
        zone = None
    for flag, value in (("--tpu_name", name), ("--tpu_zone", zone)):
        if value is None:
            continue
        if not value:
            raise UsageError(_COMMAND, f"no TPU given: give {flag}, or set {flag[2:]}: in {path or default_path()}")
        if value.startswith("-"):
            raise UsageError(_COMMAND, f"{flag} {value!r} is not a valid name of Google Cloud")
    commands = args.command
    if not commands:
        file = args.command_file or settings.get("command_file")
        commands = _lines(file) if file else settings.get("commands")
    commands = [command for command in commands or [] if command.strip()]
    if not commands:
        problem = "--command holds no command" if args.command else "give --command or --command_file"
        raise UsageError(_COMMAND, f"nothing to run: {problem}")
    return name, zone, commands


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8") as stream:
            lines = [line.strip() for line in stream]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(_COMMAND, f"--command_file: cannot read {file}: {reason}") from None
    commands = [line for line in lines if line and not line.startswith("#")]
    if not commands:
        raise UsageError(_COMMAND, f"--command_file: {file} holds no command")
    return commands


def _install(version: str) -> str:
    if version == "latest":
        return "pip install accelerate -U"
    if version == "dev":
        return f"pip install {_DEV}"
    if not _VERSION.fullmatch(version):
        raise UsageError(_COMMAND, f"--accelerate_version {version!r}: latest, dev or a number such as 1.15.0")
    return f"pip install accelerate=={version}"
