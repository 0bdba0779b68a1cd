"""Checkpoints of older versions load to the bit: what they hold is beside them in `expected.pt`.

`schema_2` was written by commit 2d18fa6. A copy of this file wrote it in a checkout of that commit:

    python -m tests.runtime.checkpoint.test_older_versions tests/golden/checkpoints/schema_2
"""

from __future__ import annotations

import copy
import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration, set_seed
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.pytree import leaves

from ..small import Numbers, Tally
from ..worlds import run

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "checkpoints" / "schema_2"
PROCESSES = {"whole": 1, "mid_epoch": 1, "window": 2, "sharded": 2}


class Model(nn.Module):
    """One fp32 element before an int64 counter, tied weights and two types of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.5]))
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("coarse", torch.arange(3, dtype=torch.bfloat16))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.embed(numbers % 7)) * self.scale)
        return logits


def _prepared(kind: str) -> tuple[Any, Any, Any, Any, Any, Tally]:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if kind == "sharded" else None
    data = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    steps = 3 if kind == "window" else 1
    accelerator: Any = Accelerator(gradient_accumulation_steps=steps, dataloader_config=data, fsdp_plugin=plugin)
    set_seed(1)
    model: Any = Model()
    others = [parameter for name, parameter in model.named_parameters() if name != "scale"]
    groups: list[dict[str, Any]] = [{"params": [model.scale], "lr": 0.02}, {"params": others}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader: Any = DataLoader(Numbers(32), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    tally = Tally()
    accelerator.register_for_checkpointing(tally)
    return accelerator, model, optimizer, loader, scheduler, tally


def _write(directory: str, kind: str) -> None:
    accelerator, model, optimizer, loader, scheduler, tally = _prepared(kind)
    tally.value = {"text": "kept", "numbers": (1, 2.5)}
    expected: dict[str, Any] = {}
    rest: list[list[int]] = []
    for number, rows in enumerate(loader, 1):
        if expected:
            rest.append(rows.tolist())
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), rows % 7)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == {"mid_epoch": 3, "window": 2}.get(kind):
            accelerator.save_state(directory)
            expected = copy.deepcopy(_state(accelerator, model, optimizer, scheduler, tally))
    if not expected:
        accelerator.save_state(directory)
        expected = _state(accelerator, model, optimizer, scheduler, tally)
        rest = [rows.tolist() for rows in loader]
    torch.save({**expected, "batches": rest}, Path(directory) / f"expected_{accelerator.process_index}.pt")


def _state(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, tally: Tally) -> dict[str, Any]:
    unwrapped = accelerator.strategy.unwrap(model)
    gradients = {name: p.grad for name, p in unwrapped.named_parameters() if p.grad is not None}
    return {
        "model": accelerator.get_state_dict(model),
        "optimizer": accelerator.strategy.optimizer_state(optimizer),
        "scheduler": scheduler.state_dict(),
        "tally": tally.value,
        "gradients": gradients if accelerator.gradient_accumulation_steps > 1 else {},
        "random": torch.rand(3),
    }


def _load(directory: str, kind: str) -> None:
    accelerator, model, optimizer, loader, scheduler, tally = _prepared(kind)
    set_seed(99)
    accelerator.load_state(directory)
    loaded = _state(accelerator, model, optimizer, scheduler, tally)
    loaded["batches"] = [rows.tolist() for rows in accelerator.skip_first_batches(loader, loader.position)]
    first, expected = (
        torch.load(Path(directory) / f"expected_{rank}.pt", weights_only=True)
        for rank in (0, accelerator.process_index)
    )
    if expected["model"]:  # the other ranks' own statistics are not saved: DDP replaces them before the next pass
        expected["model"] = first["model"]
    assert _bits(loaded) == _bits(expected)


def _bits(state: Any) -> dict[str, Any]:
    """Each leaf by its path; tensors as their type, shape and bytes."""
    return {
        path: (value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist())
        if isinstance(value, torch.Tensor)
        else value
        for path, value in leaves(state)
    }


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_checkpoint_of_schema_2_loads_to_the_bit(tmp_path: Path, kind: str) -> None:
    shutil.copytree(CHECKPOINTS / kind, tmp_path / kind)
    run(_load, str(tmp_path / kind), kind, processes=PROCESSES[kind])


if __name__ == "__main__":
    # By its own name: the processes of a world import what they run.
    write: Callable[..., None] = importlib.import_module("tests.runtime.checkpoint.test_older_versions")._write
    for name, count in PROCESSES.items():
        run(write, f"{sys.argv[1]}/{name}", name, processes=count)
