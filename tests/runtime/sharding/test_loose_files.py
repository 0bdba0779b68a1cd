"""The functions of `accelerate.checkpointing`, which write and read a checkpoint's files, with sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from tests.runtime.worlds import run

from .training import decoder, train


def _again(folder: str) -> tuple[list[str], list[float], list[float]]:
    from accel.compat.checkpointing import load_accelerator_state, save_accelerator_state

    accelerator: Any = Accelerator(fsdp_plugin=Plugin())
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    train(accelerator, model, optimizer, steps=2)
    weights = [accelerator.get_state_dict(model)]
    save_accelerator_state(folder, weights, [optimizer], [], [], accelerator.process_index, 0)
    accelerator.wait_for_everyone()
    expected, _ = train(accelerator, model, optimizer, steps=2, first=2)
    load_accelerator_state(folder, [model], [optimizer], [], [], accelerator.process_index)
    files = sorted(path.name for path in Path(folder).iterdir())
    return files, train(accelerator, model, optimizer, steps=2, first=2)[0], expected


def test_they_hold_whole_weights_and_go_on_to_the_bit(tmp_path: Path) -> None:
    for files, again, expected in run(_again, str(tmp_path)):
        assert again == expected
        assert {"model.safetensors", "optimizer.bin"} <= set(files)
