"""The flags and keys of DeepSpeed, from `accel launch` to the engine of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import needs, warm
from tests.compat.children import ROOT, environment
from tests.runtime.worlds import run_one

from .training import accelerator_of, trained

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")

_PROGRAM = str(ROOT / "tests" / "runtime" / "deepspeed" / "launched_run.py")
_FILE = """
distributed_type: DEEPSPEED
use_cpu: true
num_processes: 2
deepspeed_config: {deepspeed_config_file: ds.json}
"""
_CONFIG = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.3,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "flags": (
        "--cpu --num_processes 2 --use_deepspeed --zero_stage 3 --gradient_clipping 0.3 --zero3_init_flag false "
        "--gradient_accumulation_steps 4 --zero3_save_16bit_model true",
        {"stage": 3, "saves 16 bits": True},
    ),
    "a file": ("--config_file config.yaml", {"stage": 1}),
}


@pytest.mark.parametrize("name", RUNS)
def test_settings_of_the_launcher_reach_the_engine(name: str, tmp_path: Path) -> None:
    line, expected = RUNS[name]
    (tmp_path / "config.yaml").write_text(_FILE)
    (tmp_path / "ds.json").write_text(json.dumps(_CONFIG))
    argv = [sys.executable, "-m", "accel", "launch", *line.split(), _PROGRAM, str(tmp_path)]
    done = warm.run(argv, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), timeout=240)
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    whole_losses, whole_norms = run_one(_whole)
    assert seen.pop("losses") == pytest.approx(whole_losses, abs=1e-5)
    assert seen.pop("norms") == pytest.approx(whole_norms, abs=1e-6)
    usual = {"type": "DEEPSPEED", "processes": 2, "window": 4, "clipping": True, "precision": "no"}
    assert seen == {**usual, "saves 16 bits": False, **expected}


def _whole() -> Any:
    return trained(accelerator_of(4))
