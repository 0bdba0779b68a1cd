"""Each setting of sharding by itself: the losses are those of one process, and what it is for is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from accel import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.state import AcceleratorState
from tests.runtime.worlds import run, run_one

from .training import decoder, train

_BLOCKS = ["blocks.0", "blocks.1", "blocks.2", ""]
_USUAL = {"forwards": 1, "kept": False, "units": _BLOCKS, "offloads": False, "prefetches": False}
SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"activation_checkpointing": True}, {"forwards": 2}),
    ({"activation_checkpointing": True, "activation_checkpointing_offload": True}, {"forwards": 2}),
    ({"forward_prefetch": True}, {"prefetches": True}),
    ({"reshard_after_forward": False}, {"kept": True}),
    ({"reshard_after_forward": 2}, {}),  # kept by pairs
    ({"cpu_offload": True}, {"offloads": True}),
    ({"sync_module_states": False}, {}),
    ({"auto_wrap_policy": "no_wrap"}, {"units": [""], "kept": True}),  # the backward pass needs it at once
    ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 2000}, {}),
]  # fmt: skip


def _trained(settings: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """By setting: the losses, and what there is to see of it in the model."""
    found = []
    for setting in settings:
        AcceleratorState._reset_state()
        accelerator = Accelerator(fsdp_plugin=None if setting is None else Plugin(**setting))
        bare = decoder()
        model: Any
        model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.02))
        forwards: list[int] = []
        model.blocks[0].up.register_forward_hook(lambda *_, seen=forwards: seen.append(1))
        whole: list[bool] = []
        model.norm.register_forward_pre_hook(
            lambda *_, of=model, seen=whole: seen.append(not hasattr(of.blocks[0].up.weight, "placements"))
        )
        losses = train(accelerator, model, optimizer, steps=3, clip=0.1)[0]
        units = {name: part._get_fsdp_state() for name, part in model.named_modules() if hasattr(part, "unshard")}
        policies = [group.offload_policy for state in units.values() for group in state._fsdp_param_groups]
        found.append(
            {
                "losses": losses,
                "forwards": len(forwards) // 3,
                "kept": whole[0],
                "units": sorted(units, key=lambda name: name or "~"),
                "offloads": any(isinstance(policy, CPUOffloadPolicy) for policy in policies),
                "prefetches": any(state._states_to_forward_prefetch for state in units.values()),
            }
        )
    return found


@pytest.fixture(scope="module")
def seen() -> list[list[dict[str, Any]]]:
    settings = [setting for setting, _ in SETTINGS]
    expected = run_one(_trained, [None])[0]["losses"]
    worlds = run(_trained, settings, processes=4)
    for found in (found for world in worlds for found in world):
        found["near"] = found.pop("losses") == pytest.approx(expected, abs=1e-9)
    return worlds


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda number: str(SETTINGS[number][0]))
def test_a_setting_changes_what_it_says_and_no_loss(number: int, seen: list[list[dict[str, Any]]]) -> None:
    for world in seen:
        assert world[number] == {**_USUAL, **SETTINGS[number][1], "near": True}
