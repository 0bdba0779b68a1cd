"""`python -m accel.compat script.py [arguments]`, or `-m module`: run a program with `accel.compat`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import accel.compat  # noqa: F401  # what this command is for
from accel.launch.worker import Program, run_main

USAGE = "usage: python -m accel.compat [-m MODULE | SCRIPT] [ARGUMENTS]"


def main(argv: list[str]) -> None:
    """Run the program in ``argv`` as `__main__`, as `python` would."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    module = argv[:1] == ["-m"]
    program = argv[1:] if module else argv
    if not program:
        _refuse(f"nothing to run\n{USAGE}")
    if program[0].startswith("-") and not os.path.exists(program[0]):
        _refuse(f"unknown option {program[0]}\n{USAGE}")
    if not module and not os.path.exists(program[0]):
        _refuse(f"script {program[0]!r} not found in {os.getcwd()}")
    run_main(Program(argv=program, entry="module" if module else "script"))


def _refuse(text: str) -> NoReturn:
    print(f"accel.compat: {text}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
