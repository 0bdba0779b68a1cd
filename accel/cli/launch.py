"""`accel launch`: run a script here and now, as one rank per accelerator of this machine, or as its part of several."""

from __future__ import annotations

from collections.abc import Sequence

SUMMARY = "Run a script here and now, one process per accelerator"

EXAMPLES = """\
  accel launch train.py --lr 1e-3                      one rank per GPU, or one
  accel launch --num_processes 4 --cpu train.py        four ranks on the CPU
  accel launch --num_machines 2 --machine_rank 1 --main_process_ip node0 --num_processes 16 train.py
"""


def run_argv(argv: Sequence[str]) -> int:
    """Parses `accel launch`'s own flags; everything from the program on is the program's. Returns its exit code."""
    from accel.launch.errors import LaunchError
    from accel.launch.node import launch, plan, say
    from accel.launch.options import add_arguments
    from accel.launch.worker import Program

    from .parser import Parser
    from .words import UsageError

    parser = Parser("launch", SUMMARY, EXAMPLES, usage="accel launch [OPTIONS] SCRIPT [ARGUMENTS]")
    add_arguments(parser)
    args, words = parser.read_before_script(argv)
    if not words:
        raise UsageError("accel launch", "nothing to run: give a script, -m MODULE, or --no_python COMMAND")
    if args.module and args.no_python:
        raise UsageError("accel launch", "-m and --no_python contradict each other: keep one")
    program = Program(argv=words, entry="module" if args.module else "command" if args.no_python else "script")
    try:
        return launch(plan(vars(args), program))
    except LaunchError as error:
        say(f"accel launch: {error}")
        return 1
