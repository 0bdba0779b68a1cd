"""How a Python process is told that `import accelerate` is accel's there: two variables, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FLAG = "ACCEL_COMPAT"
STARTUP = str(Path(__file__).parents[1] / "compat" / "startup")


def is_asked(env: Mapping[str, str]) -> bool:
    """Whether ``env`` tells it."""
    return env.get(FLAG) == "1"


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What makes a Python process that is started with it begin with `import accel.compat`.

    That is ``ACCEL_COMPAT=1`` and, first on ``PYTHONPATH``, a folder whose `sitecustomize` does the import and then
    runs the one that would have been found without it.
    """
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
    return {FLAG: "1", "PYTHONPATH": os.pathsep.join([STARTUP, *paths])}
