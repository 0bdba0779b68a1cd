"""Runs small programs in Python processes of their own, with `accel.compat` or without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
_SET_BY_US = ("ACCEL_COMPAT", "PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher or `accel.compat` sets."""
    kept = {k: v for k, v in os.environ.items() if k not in _SET_BY_US and not k.startswith("ACCELERATE_")}
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": bin_first, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def python(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python words…`` to its end, with ``env`` beside the usual variables.

    In an interpreter that has torch and accel loaded, unless the program looks at what is loaded: at ``sys.modules``.
    """
    argv, variables = [sys.executable, *words], environment(**(env or {}))
    if any("sys.modules" in word or word == "-m" for word in words):
        where = cwd or ROOT
        return subprocess.run(argv, cwd=where, env=variables, capture_output=True, text=True, timeout=240)
    return warm.run(argv, cwd=cwd or ROOT, env=variables, timeout=240)


def said(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run ``python words…``, which must not fail; returns what it printed."""
    done = python(*words, cwd=cwd, env=env)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
