"""Environment variables that make `import accelerate` import accel in a Python process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FLAG = "ACCEL_COMPAT"
STARTUP = str(Path(__file__).parents[1] / "compat" / "startup")


def is_requested(env: Mapping[str, str]) -> bool:
    return env.get(FLAG) == "1"


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a new Python process start with `import accel.compat`.

    They are ``ACCEL_COMPAT=1`` and a ``PYTHONPATH`` that begins with a folder whose `sitecustomize` does the
    import and then runs the `sitecustomize` that it shadows.
    """
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != STARTUP]
    return {FLAG: "1", "PYTHONPATH": os.pathsep.join([STARTUP, *paths])}
