"""The example: trains on real scans, equally on one process and two, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.digits import DIGITS, SAME, write_in_float64
from tests.needs import missing

from .worlds import clean_env, free_port, world_env

if find_spec("sklearn") is None:  # not imported here: each worker collects all files
    missing("sklearn", "pip install 'accel-launch[demo]'")

ROOT = Path(__file__).parents[2]


def train(*arguments: str, processes: int = 1, script: Path = DIGITS) -> list[str]:
    """Run the example as a launcher would; returns what each process printed."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), *arguments],
            env=clean_env(
                **world_env(rank, processes, port),
                PYTHONPATH=str(ROOT),
                OMP_NUM_THREADS="1",
                PATH=os.environ["PATH"],
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = [(*process.communicate(timeout=240), process.returncode) for process in running]
    for out, err, code in ended:
        assert (code, err) == (0, ""), f"{err}\n{out}"
    return [out for out, _, _ in ended]


def losses(path: Path) -> list[float]:
    values: list[float] = json.loads(path.read_text())
    return values


EPOCHS = 3  # that all twelve end above 97 % is asserted of the job that `make demo` submits


def test_two_processes_lose_what_one_does(tmp_path: Path) -> None:
    script = write_in_float64(tmp_path)
    common = ("--epochs", str(EPOCHS), "--losses")
    alone = train(*common, str(tmp_path / "1.json"), script=script)[0]
    main, other = train(*common, str(tmp_path / "2.json"), processes=2, script=script)
    one, two = losses(tmp_path / "1.json"), losses(tmp_path / "2.json")
    assert len(one) == len(two) == EPOCHS * (1437 // 64)
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= SAME
    assert other == ""
    for printed in (alone, main):
        assert len([line for line in printed.splitlines() if line.startswith("epoch ")]) == EPOCHS
        last = printed.splitlines()[-1]
        assert last.startswith("test accuracy: 0.9")
        assert float(last.split()[-1]) >= 0.95


@pytest.mark.long
def test_going_on_from_a_checkpoint_is_as_never_having_stopped(tmp_path: Path) -> None:
    common = ("--epochs", "2", "--lr", "0.001", "--checkpoint-dir", str(tmp_path / "ck"))
    train(*common, "--losses", str(tmp_path / "whole.json"))
    train(*common, "--stop-after", "1")
    train(*common, "--resume", "--losses", str(tmp_path / "resumed.json"))
    assert losses(tmp_path / "resumed.json") == losses(tmp_path / "whole.json")
