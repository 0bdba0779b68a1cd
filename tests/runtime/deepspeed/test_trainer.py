"""Trainer of transformers with DeepSpeed on accel has the losses and norms that it has by DDP, and resumes."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import needs, warm
from tests.compat.children import ROOT, environment

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")
needs.package("transformers")

_PROGRAM = str(ROOT / "tests" / "runtime" / "deepspeed" / "trainer_run.py")


@pytest.mark.timeout(900)
def test_trainer_has_the_losses_and_norms_of_ddp_and_resumes(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2", _PROGRAM, str(tmp_path)]
    done = warm.run(
        [*argv, "-1", "0", "2", "3", "2t", "2s", "3s"], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), timeout=420
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    ddp = seen.pop("-1")
    assert (ddp["type"], len(set(ddp["losses"]))) == ("MULTI_CPU", 4)
    for stage, run in seen.items():
        assert run["type"] == "DEEPSPEED", stage
        assert run["losses"] == pytest.approx(ddp["losses"], abs=1e-5), stage
        assert run["norms"] == pytest.approx(ddp["norms"], abs=1e-5), stage
    for stage, run in {**seen, "-1": ddp}.items():
        assert run["resumed"] in (run["losses"], run["losses"][2:]), stage
