"""Trains the decoder as `accel launch` has set it up, and writes what is seen of the settings into a folder."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from accel import Accelerator, gather_object
from tests.runtime.sharding.training import decoder, train


def main(out: Path) -> None:
    """Take two steps and a look."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator: Any = Accelerator()
    plugin = accelerator.state.fsdp_plugin
    bare = decoder(accelerator.process_index)
    own = bare.embed.weight.detach().clone()  # another on every process
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.02))
    share = model.embed.weight.to_local()
    keeps = any(torch.equal(share, part[: len(share)]) for part in own.unfold(0, len(share), 1).transpose(1, 2))
    forwards: list[int] = []
    model.blocks[0].up.register_forward_hook(lambda *_: forwards.append(1))
    kept: list[bool] = []
    model.norm.register_forward_pre_hook(lambda *_: kept.append(not hasattr(model.blocks[0].up.weight, "placements")))
    losses = train(accelerator, model, optimizer, steps=1)[0]
    units = {name: part._get_fsdp_state() for name, part in model.named_modules() if hasattr(part, "unshard")}
    policies = [group.offload_policy for state in units.values() for group in state._fsdp_param_groups]
    accelerator.save_state(out / "checkpoint")
    seen = {
        "type": accelerator.distributed_type.value,
        "device": accelerator.device.type,
        "mesh": list(accelerator.torch_device_mesh.shape),
        "warned": [said for said in (str(warning.message) for warning in caught) if "FullySharded" in said],
        "keep their own": all(gather_object([keeps])),
        "losses": losses,
        "forwards": len(forwards),
        "kept": kept[0],
        "units": sorted(units),
        "whole": sorted(name for name, p in model.named_parameters() if not hasattr(p, "placements")),
        "offloads": any(isinstance(policy, CPUOffloadPolicy) for policy in policies),
        "prefetches": any(state._states_to_forward_prefetch for state in units.values()),
        "computes in": str(plugin.mixed_precision_policy.param_dtype) if plugin.mixed_precision_policy else None,
        "saved": sorted(path.name for path in (out / "checkpoint").glob("*.safetensors")),
        "loads on one": os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"],
    }
    if accelerator.is_main_process:
        (out / "seen.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
