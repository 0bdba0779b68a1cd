"""Every flag and key of sharding, from `accel launch` to what it changes in a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.compat.children import ROOT, environment

_PROGRAM = str(ROOT / "tests" / "runtime" / "sharding" / "launched_run.py")
_BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
_USUAL = {
    "type": "FSDP", "device": "cpu", "mesh": [1, 2, 1, 1, 1], "warned": [], "keep their own": False, "forwards": 1,
    "kept": False, "units": ["", *_BLOCKS], "whole": [], "offloads": False, "prefetches": False, "computes in": None,
    "saved": [], "loads on one": "true",
}  # fmt: skip
_OF_1 = [
    "fsdp_version=1: models are sharded by fully_shard (version 2)",
    "backward_prefetch=BACKWARD_POST: parameters are gathered ahead of the backward pass",
    "use_orig_params=False: parameters stay the script's own",
]
_FILE = """
distributed_type: FSDP
use_cpu: true
num_processes: 4
fsdp_config: {fsdp_ignored_modules: norm, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: NO_WRAP}
parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}
"""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing said": ("--cpu --num_processes 2 --use_fsdp", {}),
    "all of version 2": (
        "--cpu --num_processes 2 --use_fsdp --mixed_precision bf16 --fsdp_offload_params true "
        "--fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true "
        "--fsdp_forward_prefetch true --fsdp_reshard_after_forward false --fsdp_auto_wrap_policy SIZE_BASED_WRAP "
        "--fsdp_min_num_params 1050 --fsdp_state_dict_type FULL_STATE_DICT --fsdp_cpu_ram_efficient_loading false",
        {"offloads": True, "forwards": 2, "prefetches": True, "kept": True,
         "units": ["", *(f"{block}{part}" for block in _BLOCKS for part in ("", ".up"))],
         "computes in": "torch.bfloat16", "saved": ["model.safetensors"], "loads on one": "false"},
    ),
    "all of version 1": (
        "--cpu --num_processes 2 --use_fsdp --fsdp_version 1 --fsdp_sharding_strategy SHARD_GRAD_OP "
        "--fsdp_backward_prefetch BACKWARD_POST --fsdp_use_orig_params false --fsdp_sync_module_states false "
        "--fsdp_cpu_ram_efficient_loading false --fsdp_forward_prefetch true "
        "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Linear,Block",
        {"warned": _OF_1, "keep their own": True, "kept": True, "prefetches": True, "loads on one": "false",
         "units": ["", *(f"{block}{part}" for block in _BLOCKS for part in ("", ".down", ".up"))]},
    ),
    "a file": ("--config_file config.yaml", {"mesh": [2, 2, 1, 1, 1], "units": [""], "kept": True,
                                             "whole": ["norm.bias", "norm.weight"]}),
}  # fmt: skip


def _launched(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "accel", "launch", *line.split(), _PROGRAM, str(folder)]
    return warm.run(argv, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), timeout=240)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_said_to_the_launcher_is_what_is_done(name: str, tmp_path: Path) -> None:
    line, wanted = RUNS[name]
    (tmp_path / "config.yaml").write_text(_FILE)
    done = _launched(line, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen.pop("losses")) == 1
    for said in (warned := seen["warned"]):
        seen["warned"] = [part for part in wanted.get("warned", [said]) if part in said]
    assert len(warned) <= 1
    assert seen == {**_USUAL, **wanted}
