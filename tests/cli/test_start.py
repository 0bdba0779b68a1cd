"""`accel` starts whatever else is on the machine: packages that cannot be imported, and an environment without PATH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel.cli import COMMANDS, exit_status
from tests.marks import long

from .conftest import ROOT, Accel

# What training code looks for and can do without.
OPTIONAL = [
    "tensorflow", "timm", "torchvision", "transformers", "datasets", "deepspeed", "torch_xla", "tensorboard", "wandb",
    "mlflow", "trackio", "comet_ml", "bitsandbytes", "transformer_engine", "torchao", "huggingface_hub", "pandas",
]  # fmt: skip
TRAIN = "from accel import Accelerator; print(Accelerator(cpu=True).num_processes)\n"


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """PYTHONPATH with a copy of each of them that is of no use."""
    top = tmp_path / "broken"
    for name in OPTIONAL:
        (top / name).mkdir(parents=True)
        (top / name / "__init__.py").write_text(f"raise RuntimeError('{name} needs another torch')\n")
    return f"{top}:{ROOT}"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_needs_no_optional_package(accel: Accel, broken: str, command: str) -> None:
    done = accel.finish(*command.split(), "--help", PYTHONPATH=broken)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: accel")


@pytest.mark.parametrize("processes", [*long("1"), "2"])
def test_training_needs_no_optional_package(accel: Accel, broken: str, processes: str) -> None:
    accel.script(TRAIN)
    shown = accel("launch", "--cpu", "--num_processes", processes, "train.py", PYTHONPATH=broken)
    assert shown.split() == [processes] * int(processes)


def called_by_path(accel: Accel, *argv: str) -> str:
    """What the installed script prints, called by its whole path in an environment without PATH."""
    script = accel.here / "accel"
    script.write_text("import sys\nfrom accel.cli import main\nsys.exit(main())\n")
    env = accel.env()
    del env["PATH"]
    done = subprocess.run(
        [sys.executable, script, *argv], cwd=accel.here, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", ["", "launch"])
def test_help_needs_no_path(accel: Accel, command: str) -> None:
    assert called_by_path(accel, *command.split(), "--help").startswith("usage: accel")


def test_jobs_need_no_path(accel: Accel) -> None:
    accel.script(TRAIN)
    assert called_by_path(accel, "launch", "--cpu", "--num_processes", "2", "train.py").split() == ["2", "2"]
    assert "local" in called_by_path(accel, "targets")
    job = called_by_path(accel, "submit", "train.py").strip()
    called_by_path(accel, "wait", job)
    assert job in called_by_path(accel, "list")


def test_ranks_that_cannot_be_spread_are_one_line(accel: Accel) -> None:
    accel.script(TRAIN)
    done = accel.finish("launch", "--num_processes", "3", "--num_machines", "2", "train.py")
    assert done.returncode == exit_status.USAGE
    assert done.stdout == b""
    (said,) = done.stderr.decode().splitlines()
    assert "--num_processes 3 is not divisible by the number of machines (2)" in said
