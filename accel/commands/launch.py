"""`python -m accel.commands.launch` and `accel-launch` are `accel launch`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run `accel launch` with this process's arguments. Return its exit code."""
    from accel.cli import main as command

    sys.argv[1:1] = ["launch"]  # `main` reads sys.argv, as after `accel launch`
    return command()


if __name__ == "__main__":
    sys.exit(main())
