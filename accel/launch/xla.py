"""Runs a script's function on every core of this TPU host.

`python -m accel.launch.xla script|module FUNCTION NAME [ARGUMENTS]`
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def main(argv: list[str]) -> int:
    """Imports the script, which must not train on import, and starts its function once a core. Returns an exit code."""
    import torch_xla.distributed.xla_multiprocessing as xmp

    kind, function, name, *rest = argv
    module = _load(kind, name)
    if not hasattr(module, function):
        print(
            f"accel launch: {name} has no function {function!r}: name the one to run with --main_training_function",
            file=sys.stderr,
        )
        return 1
    sys.argv = [module.__file__ or name, *rest]
    xmp.spawn(_Core(getattr(module, function)), args=())
    return 0


class _Core:
    """What each core runs."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, index: int) -> None:
        os.environ["FORK_LAUNCHED"] = "1"  # as Accelerate marks a process that was forked for it
        self._function()


def _load(kind: str, name: str) -> Any:
    if kind == "module":
        return importlib.import_module(name)
    folder, file = os.path.split(os.path.abspath(name))
    sys.path.insert(0, folder)
    return importlib.import_module(os.path.splitext(file)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
