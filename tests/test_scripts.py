"""The scripts of `scripts/` that contributors run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERY_OTHER = """
from pathlib import Path

def test_it():
    log = Path(__file__).with_name("log")
    log.write_text(log.read_text() + "x" if log.exists() else "x")
    assert len(log.read_text()) % 2
"""


def repeat(*words: str) -> tuple[int, str]:
    env = {**os.environ, "PYTHON": sys.executable, "BUSY": "1"}  # a busy process costs what the runs cost
    done = subprocess.run([str(ROOT / "scripts/repeat"), *words], env=env, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_repeat_names_the_runs_that_failed(tmp_path: Path) -> None:
    test = tmp_path / "test_other.py"
    test.write_text(EVERY_OTHER)
    code, said = repeat("2", str(test))
    assert code == 1
    assert "run 1 of 2: 1 passed" in said
    assert "run 2: " in said
    assert said.endswith("failed in run 2 of 2\n")


def test_repeat_needs_a_number() -> None:
    assert repeat("three", "x.py")[0] == 2
