"""Command lines of `accel launch`, resolved and planned as the command does it, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import accel.launch.plan
from accel.cli.arguments import Parser
from accel.cli.launch import resolve_settings
from accel.launch import external
from accel.launch.devices import Devices, only_cpu, visible
from accel.launch.flags import add_arguments
from accel.launch.plan import Launch
from accel.launch.worker import Program
from accel.settings.precedence import Value

UUIDS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
SCRIPT = Program(argv=["train.py", "--lr", "1"], entry="script")


def given(*words: str) -> dict[str, Any]:
    """What the flags say, and nothing else."""
    parser = Parser("launch", "")
    add_arguments(parser, defaults_too=False)
    return vars(parser.read_before_script(words)[0])


def found(*words: str, **env: str) -> dict[str, Value]:
    """Every setting with its source. Raises UsageError."""
    return resolve_settings(given(*words), env)


def options(*words: str, **env: str) -> dict[str, Any]:
    return {name: value.value for name, value in found(*words, **env).items()}


def planned(*words: str, **env: str) -> Launch:
    return external.plan_launch(options(*words, **env), SCRIPT, env)


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script, and a home without a configuration file."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four."""

    def find(env: dict[str, str]) -> Devices:
        ids = visible(env.get("CUDA_VISIBLE_DEVICES"), UUIDS)
        return Devices(kind="cuda", ids=tuple(ids), cpus=16) if ids else only_cpu()

    monkeypatch.setattr(accel.launch.plan, "find", find)
