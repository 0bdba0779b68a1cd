"""Runs a script in a process of its own, as a user would: trackers hold on to a process, and start threads in it."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import warm
from ...needs import missing
from ..worlds import clean_env

# A port that nothing listens on (discard): a connection to it is refused at once, and none leaves this machine.
NOWHERE = "http://127.0.0.1:9"
# What packages do beside logging, in threads and programs of their own: looking for repositories, packages and devices.
QUIET = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_X_DISABLE_META": "true",
    "WANDB_X_DISABLE_STATS": "true",
    "COMET_AUTO_LOG_CODE": "0",
    "COMET_AUTO_LOG_ENV_DETAILS": "0",
    "COMET_AUTO_LOG_GIT_METADATA": "0",
    "COMET_AUTO_LOG_GIT_PATCH": "0",
}
# ClearML has no variables for that, but arguments of Task.init. Frameworks that are not named would be connected.
_CLEARML_PARTS = (
    "matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm hydra detect_repository tfdefines"
)
CLEARML_QUIET = {
    "auto_resource_monitoring": False,
    "auto_connect_streams": False,
    "auto_connect_frameworks": dict.fromkeys(f"{_CLEARML_PARTS} joblib megengine catboost gradio".split(), False),
}
_FOREIGN = ("WANDB_", "MLFLOW_", "COMET_", "CLEARML_", "DVC", "SWANLAB_", "TRACKIO_", "HTTP", "http", "NO_PROXY")

# Logs the same with any tracker: arguments are its name and its init_kwargs as JSON.
TRAIN = """
import json, sys
import numpy as np, torch
from accel import Accelerator

name, init_kwargs = sys.argv[1], json.loads(sys.argv[2])
accelerator = Accelerator(cpu=True, log_with=name, project_dir="logs")
config = {"lr": 0.1, "layers": [1, 2], "model": "tiny", "nothing": None}
accelerator.init_trackers("digits", config, init_kwargs={name: init_kwargs})
for step in range(3):
    accelerator.log(
        {
            "loss": torch.tensor(1.5 / (step + 1)),
            "train_accuracy": np.float32(0.25),
            "note": "hello",
            "pair": {"a": 1, "b": torch.tensor([2.0])},
            "many": [1.0, 2.0],
        },
        step=step,
    )
accelerator.end_training()
print("trained with", len(accelerator.trackers), "trackers")
"""

# The files of wandb and SwanLab: LevelDB's log format behind a header of seven bytes.
LOG_READER = """
import struct

def records(path):
    data = open(path, "rb").read()
    at, whole = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""
"""


def run_script(script: str, home: Path, *arguments: object, **env: str) -> str:
    """Run ``script`` in ``home`` (its home directory too); returns what it said on both streams. It must succeed."""
    (home / "script.py").write_text(textwrap.dedent(script))
    kept = {name: value for name, value in clean_env().items() if not name.startswith(_FOREIGN)}
    variables = {
        **kept,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        **QUIET,
        **env,
    }
    command = [sys.executable, "script.py", *map(str, arguments)]
    done = warm.run(command, cwd=home, env=variables, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def train(home: Path, name: str, init_kwargs: dict[str, Any] | None = None, **env: str) -> str:
    """Run `TRAIN` with the tracker ``name``; returns what it said."""
    return run_script(TRAIN, home, name, json.dumps(init_kwargs or {}), **env)


def read_back(script: str, home: Path, **env: str) -> Any:
    """Run ``script``, which prints JSON in its last line; returns what that says."""
    lines = [line for line in run_script(script, home, **env).splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1])


def need(package: str) -> None:
    """Skip, or in CI fail, where ``package`` is not installed."""
    if find_spec(package) is None:
        missing(f"the package {package}", f"pip install {package}")
