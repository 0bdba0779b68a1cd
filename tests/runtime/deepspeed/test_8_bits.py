"""Layers in 8 bits under engines of DeepSpeed: near the losses of bf16 at every stage, saved and loaded to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator
from accel.plugins.parallelism import ParallelismConfig
from accel.precision.float8 import is_float8_layer
from accel.state import AcceleratorState
from tests import needs
from tests.runtime.worlds import run

from .training import message_of, plugin, quiet

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")
if find_spec("torchao") is None:
    needs.missing("torchao", "pip install -c constraints.txt torchao")

STAGES = (0, 2, 3)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16)
    )


def _prepared(precision: str, stage: int, **sizes: Any) -> tuple[Any, Any, Any]:
    AcceleratorState._reset_state()
    engine = plugin(stage, zero3_save_16bit_model=True)
    engine.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
    accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=engine, **sizes)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, optimizer


def _losses(accelerator: Any, model: Any, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """The mean losses of all processes; each has half of the same batches."""
    losses = []
    for step in steps:
        rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        own = rows.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = (model(own) - own.roll(1, 1)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _trained(folder: Path) -> dict[str, Any]:
    quiet()
    seen: dict[str, Any] = {"bf16": _losses(*_prepared("bf16", 2), range(10))}
    for stage in STAGES:
        accelerator, model, _ = trained = _prepared("fp8", stage)
        seen[f"losses {stage}"] = _losses(*trained, range(10))
        seen[f"facts {stage}"] = (accelerator.mixed_precision, accelerator.fp8_backend.value)
        seen[f"layers {stage}"] = [name for name, module in model.module.named_modules() if is_float8_layer(module)]
        accelerator.save_state(folder / str(stage))
        accelerator.save_model(model, folder / f"model {stage}")
        following = _losses(*trained, (10, 11))
        accelerator.free_memory()
        accelerator, _, _ = resumed = _prepared("fp8", stage)
        accelerator.load_state(folder / str(stage))
        seen[f"resumed {stage}"] = following == _losses(*resumed, (10, 11))
        accelerator.free_memory()
    return seen


def test_losses_are_near_those_of_bf16_and_a_resumed_run_equals_one_that_went_on(tmp_path: Path) -> None:
    seen, other = run(_trained, tmp_path)
    assert seen == other
    for stage in STAGES:
        assert seen[f"losses {stage}"] == pytest.approx(seen["bf16"], abs=1e-1)
        assert seen[f"losses {stage}"] != seen["bf16"]
        assert seen[f"facts {stage}"] == ("fp8", "AO")
        assert seen[f"layers {stage}"] == ["2", "4"]  # not the first and the last
        assert seen[f"resumed {stage}"]
        weights = load_file(tmp_path / f"model {stage}" / "model.safetensors")
        assert {name: value.shape for name, value in weights.items()} == {
            name: value.shape for name, value in _model().state_dict().items()
        }


def _split() -> str:
    quiet()
    return message_of(lambda: _prepared("fp8", 1, parallelism_config=ParallelismConfig(tp_size=2)))


def test_layers_that_deepspeed_would_split_are_refused() -> None:
    words = (
        "tp_size under DeepSpeed: layers in 8 bits (mixed_precision='fp8') cannot be split: leave out one of the two"
    )
    assert run(_split) == [words, words]
