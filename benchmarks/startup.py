"""The commands that a person waits for: help, list and a dry run, against starting Python at all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from .measure import Bar, interleaved, report, wall

BIN = Path(sys.executable).parent
FLOOR = "python -c pass"
LAUNCH = "accel launch --help"  # some 130 flags, each in two spellings


def startup(rounds: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text("print('hello')\n")
        env = {**os.environ, "ACCEL_HOME": str(Path(folder, "home"))}
        accel = str(BIN / "accel")
        measures = {
            FLOOR: wall([sys.executable, "-c", "pass"]),
            "accel --help": wall([accel, "--help"], env, folder),
            LAUNCH: wall([accel, "launch", "--help"], env, folder),
            "accel list": wall([accel, "list"], env, folder),
            "accel submit --dry-run": wall([accel, "submit", "--dry-run", "train.py"], env, folder),
            "torchrun --help": wall([str(BIN / "torchrun"), "--help"]),
            "accelerate --help": wall([str(BIN / "accelerate"), "--help"]),
        }
        ours = [name for name in measures if name.startswith("accel ")]
        bars = [Bar(ours=name, base=FLOOR, limit=6 if name == LAUNCH else 5) for name in ours]
        return report("startup", interleaved(measures, rounds), bars)
