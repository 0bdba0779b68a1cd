"""`accel test`: does training work here? Runs `accel.sanity` under `accel launch`, or as a job on a target.

stdout has a line for every check: `ok` or `FAILED`, its name, the number of processes. The exit code is 0 if all went
well; else 1 (or, for a target, that of the job). The last line on stderr says that all went well, or names the check
that failed. The configuration file that `accel launch` would read is tested, and without one 1, 2 and 4 processes.

--json  a line each: {"check", "processes", "ok", "seconds"}; a failed one has "process" and "message" too
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from . import exits, values
from .output import note, print_json
from .words import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from .parser import Parser

EXAMPLES = """\
  accel test
  accel test --num_processes 8
  accel test --config_file accelerate.yaml
  accel test --target cluster --num_processes 4

Without --num_processes it runs on as many as the configuration file says, where there is one; else on 1, 2 and 4: on
GPUs if there are as many, else on the CPU."""

_COUNTS = (1, 2, 4)
_MODULE = "accel.sanity"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--num_processes", metavar="N", type=values.whole, help="only on N processes")
    parser.add_argument("--cpu", action="store_true", help="on the CPU even where there is a GPU")
    file = "with the settings of this file (default: the one that `accel config` writes, if it is there)"
    parser.add_argument("--config_file", metavar="FILE", help=file)
    parser.add_argument("--target", metavar="NAME", help="as a job there; N then counts the processes of its node")
    parser.add_argument("--json", action="store_true", help="answer in JSON, a line for every check")


def run(args: Namespace) -> int:
    if args.num_processes == 0:
        raise UsageError("accel test", "--num_processes 0: a whole number from 1 on")
    if args.target is not None:
        return _run_there(args)
    path, given = _file(args)
    counts = [args.num_processes] if args.num_processes else [None] if _names_count(given) else list(_COUNTS)
    for count in counts:
        code = _run_here([*given, *_flags(count, given, cpu=args.cpu)], as_json=args.json)
        if code != exits.OK:
            return code
    note(f"test: all went well{f' with the settings of {path}' if path else ''}: training works here")
    return exits.OK


def _file(args: Namespace) -> tuple[str | None, list[str]]:
    """The configuration file that counts, as for `accel launch`, and its settings as flags."""
    from .launch_file import default_path, read_flags

    path = args.config_file
    if path is None and not args.cpu and os.path.isfile(default_path()):
        path = default_path()
    return path, read_flags("accel test", path) if path is not None else []


def _names_count(flags: Sequence[str]) -> bool:
    return any(flag.startswith("--num_processes=") for flag in flags)


def _flags(count: int | None, given: Sequence[str], *, cpu: bool) -> list[str]:
    from accel.launch.devices import find

    flags = [] if count is None else [f"--num_processes={count}"]
    too_few = count is not None and count > find().count
    return [*flags, "--cpu"] if (cpu or too_few) and "--cpu" not in given else flags


def _run_here(flags: Sequence[str], *, as_json: bool) -> int:
    """Run the checks under `accel launch`, passing on what they say as they say it."""
    command = [sys.executable, "-m", "accel", "launch", *flags, "-m", _MODULE, "--json"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    failed: dict[str, Any] | None = None
    last = "the start"
    try:
        assert running.stdout is not None
        for line in running.stdout:
            result = _result(line)
            if result is None:
                print(line, end="", file=sys.stderr)
                continue
            last = str(result["check"])
            failed = failed or (None if result["ok"] else result)
            _show(result, as_json=as_json)
        code = running.wait()
    except KeyboardInterrupt:
        running.wait()  # it has been interrupted too, and ends its processes
        raise
    if failed is not None:
        said = f"process {failed['process']} of {failed['processes']}: {failed['message']}"
        note(f"test: {failed['check']!r} failed: {said}")
        return exits.ERROR
    if code != exits.OK:
        note(f"test: `accel launch {' '.join(flags)}` ended with code {code} after {last!r}")
        return exits.ERROR
    return exits.OK


def _result(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"check", "processes", "ok"} <= found.keys() else None


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result, one_line=True)
    else:
        count = result["processes"]
        print(f"{'ok' if result['ok'] else 'FAILED':<8}{result['check']:<16}{count} process{'es' * (count > 1)}")
    sys.stdout.flush()


def _run_there(args: Namespace) -> int:
    from . import submit

    if args.config_file is not None:
        raise UsageError("accel test", "--config_file is for this machine: a target's settings are in accel.yaml")
    words = [f"--target={args.target}", "--name=sanity", "--follow", "-m", _MODULE]
    if args.num_processes is not None:
        words.insert(0, f"--procs-per-node={args.num_processes}")
    if args.cpu:
        words.insert(0, "--env=ACCELERATE_USE_CPU=1")
    code = submit.run_argv([*words, *(["--json"] if args.json else [])])
    if code not in (exits.OK, exits.INTERRUPTED):
        note(f"test: failed on {args.target}; the line that begins with FAILED names the check")
    if code == exits.OK:
        note(f"test: all went well: training works on {args.target}")
    return code
