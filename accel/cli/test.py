"""`accel test`: check that training works, with `accel.sanity` under `accel launch` or as a job on a target.

stdout has a line for every check: `ok` or `FAILED`, its name, the number of processes. The exit code is 0 if
all passed, else 1 (for a target, that of the job). The last line on stderr reports success or names the check
that failed. Tests the configuration file that `accel launch` would read; without one, 1, 2 and 4 processes,
the last also with sharded models (FSDP). Sizes of a `parallelism_config` are used, and then leave only the numbers
that they make up.

--json  a line each: {"check", "processes", "ok", "seconds"}; a failed one has "process" and "message" too
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from accel.launch.signals import TerminationSignals
from schedulers.processes import die_with_parent

from . import arguments, exit_status
from .argv import UsageError
from .output import note, print_json
from .require_torch import torch_is_installed

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from .arguments import Parser

EXAMPLES = """\
  accel test
  accel test --num_processes 8
  accel test --config_file accelerate.yaml
  accel test --target cluster --num_processes 4

Without --num_processes it tests the number of processes in the configuration file, else 1, 2 and 4 processes. Without
a file it also tests 4 with sharded models (FSDP). With parallelism_config_tp_size: 2 in the file, it tests 2 processes;
with FSDP too, 2 and 4. It uses GPUs if there are enough, else the CPU."""

_COMMAND = "accel test"
_COUNTS = (1, 2, 4)
_MODULE = "accel.sanity"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--num_processes", metavar="N", type=arguments.count, help="test with N processes only")
    parser.add_argument("--cpu", action="store_true", help="test on the CPU even if there are GPUs")
    file = "settings to test (default: the file that `accel config` writes, if it exists)"
    parser.add_argument("--config_file", metavar="FILE", help=file)
    parser.add_argument("--target", metavar="NAME", help="test as a job on this target; N is then per node")
    parser.add_argument("--json", action="store_true", help="print a JSON line per check")


def run(args: Namespace) -> int:
    if args.num_processes == 0:
        raise UsageError(_COMMAND, "--num_processes 0: expects a whole number of 1 or more")
    if args.target is not None:
        return _run_on_target(args)
    if not torch_is_installed(_COMMAND):
        return exit_status.ERROR
    path = _file(args)
    for flags in launches(args, path):
        code = _run_here(flags, as_json=args.json)
        if code != exit_status.OK:
            return code
    note(f"test: all checks passed{f' with the settings of {path}' if path else ''}: training works on this machine")
    return exit_status.OK


def _file(args: Namespace) -> str | None:
    """Return the configuration file in use, as for `accel launch`."""
    from .launch_file import active_path

    return None if args.cpu and args.config_file is None else active_path(args.config_file)


def launches(args: Namespace, path: str | None) -> list[list[str]]:
    """Return the flags of each launch to run. Raises UsageError."""
    from accel.launch.devices import find
    from accel.settings.contradictions import BACKEND_SWITCHES, SIZES

    from .launch import resolve_settings

    requested = {"config_file": path, "cpu": args.cpu or None, "num_processes": args.num_processes}
    settings = resolve_settings(
        {name: value for name, value in requested.items() if value is not None}, command=_COMMAND
    )
    if settings["compute_environment"].value == "AMAZON_SAGEMAKER":
        raise UsageError(_COMMAND, f"{path} is for SageMaker: the checks run on this machine, or on a --target")
    flags = [*([] if path is None else [f"--config_file={path}"]), *(["--cpu"] if args.cpu else [])]
    if settings["num_processes"].layer == "file":
        return [flags]
    switches = [name for name in BACKEND_SWITCHES if settings[name].value]
    gpus = None if switches else find().count  # None: the device is set. Else the CPU replaces missing GPUs

    def flags_for(count: int) -> list[str]:
        return [*flags, f"--num_processes={count}", *(["--cpu"] if gpus is not None and count > gpus else [])]

    if args.num_processes:
        return [flags_for(args.num_processes)]
    counts: Sequence[int] = _COUNTS
    product = math.prod(settings[name].value for name in SIZES) if settings["use_parallelism_config"].value else 1
    if product > 1:  # without FSDP, the sizes make up the world
        counts = [count for count in _COUNTS if count % product == 0 and settings["use_fsdp"].value] or [product]
    sharded = [[*flags_for(_COUNTS[-1]), "--use_fsdp"]] if path is None and switches in ([], ["cpu"]) else []
    return [*map(flags_for, counts), *sharded]


def _run_here(flags: Sequence[str], *, as_json: bool) -> int:
    """Run the checks under `accel launch`, which ends gracefully with this process. Output is forwarded at once."""
    parent = os.getpid()
    command = [sys.executable, "-m", "accel", "launch", *flags, "-m", _MODULE, "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent)
    )
    signals = TerminationSignals(lambda signum: process.send_signal(signal.SIGTERM))
    failed: dict[str, Any] | None = None
    last: str | None = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            result = _result(line)
            if result is None:
                print(line, end="", file=sys.stderr)
                continue
            last = str(result["check"])
            failed = failed or (None if result["ok"] else result)
            _show(result, as_json=as_json)
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # it has been interrupted too, and ends its processes
        raise
    finally:
        signals.forget()
    if signals.signum:
        return signals.exit_code
    if failed is not None:
        detail = f"process {failed['process']} of {failed['processes']}: {failed['message']}"
        note(f"test: {failed['check']!r} failed: {detail}")
        return exit_status.ERROR
    if code == exit_status.USAGE and last is None:
        return code  # rejected: the launcher has reported the reason
    if code != exit_status.OK:
        note(f"test: `{shlex.join(['accel', 'launch', *flags])}` ended with code {code} after {last or 'the start'!r}")
        return exit_status.ERROR
    return exit_status.OK


def _result(line: str) -> dict[str, Any] | None:
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) and {"check", "processes", "ok"} <= result.keys() else None


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result, one_line=True)
    else:
        count = result["processes"]
        print(f"{'ok' if result['ok'] else 'FAILED':<8}{result['check']:<16}{count} process{'es' * (count > 1)}")
    sys.stdout.flush()


def _run_on_target(args: Namespace) -> int:
    from . import submit

    if args.config_file is not None:
        raise UsageError(_COMMAND, "--config_file is for this machine: a target's settings are in accel.yaml")
    argv = [f"--target={args.target}", "--name=sanity", "--follow", "-m", _MODULE]
    if args.num_processes is not None:
        argv.insert(0, f"--procs-per-node={args.num_processes}")
    if args.cpu:
        argv.insert(0, "--env=ACCELERATE_USE_CPU=1")
    code = submit.run_argv([*argv, *(["--json"] if args.json else [])])
    if code not in (exit_status.OK, exit_status.INTERRUPTED):
        note(f"test: failed on {args.target}; the line that begins with FAILED names the check")
    if code == exit_status.OK:
        note(f"test: all checks passed: training works on {args.target}")
    return code
