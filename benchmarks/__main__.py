"""`python -m benchmarks [NAME…] [--rounds N]`: exits with 1 when a bar is missed."""

from __future__ import annotations

import argparse
import sys

from . import __doc__ as about
from .jobs import listing, noticing
from .launch import gang, single
from .runtime import checkpoints, collectives, ddp_steps, dispatch, imports, loaders, samplers, steps
from .startup import startup

ALL = {
    "startup": (startup, 15),
    "list": (listing, 5),
    "wait": (noticing, 9),
    "single": (single, 7),
    "gang": (gang, 5),
    "imports": (imports, 9),
    "steps": (steps, 15),
    "ddp_steps": (ddp_steps, 9),
    "samplers": (samplers, 9),
    "loaders": (loaders, 15),
    "dispatch": (dispatch, 7),
    "collectives": (collectives, 15),
    "checkpoints": (checkpoints, 5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(ALL)}")
    parser.add_argument("--rounds", type=int, help="instead of each benchmark's own number")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ALL]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    met = [ALL[name][0](args.rounds or ALL[name][1]) for name in args.names or ALL]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
