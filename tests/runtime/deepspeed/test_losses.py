"""Engines of DeepSpeed have the losses and norms of one process at every stage, whatever the accumulation window."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel import DummyOptim, DummyScheduler
from accel.parallel.deepspeed_engine import DeepSpeedEngineWrapper
from accel.plugins.deepspeed import DeepSpeedPlugin
from tests import needs
from tests.runtime.sharding.training import decoder
from tests.runtime.worlds import run, run_one

from .training import CLIP, ROWS, Run, accelerator_of, adagrad_of, assert_near, epoch, loader, plugin, quiet, trained

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")

WINDOWS = (1, 2, 4)  # of 10 batches: the last of 4 has 2
STAGES = (0, 1, 2, 3)
Seen = dict[str, Any]


def _whole() -> dict[str, Run]:
    runs = {f"window {window}": trained(accelerator_of(window)) for window in WINDOWS}
    return {
        **runs,
        "scheduled": trained(accelerator_of(), scheduled=True),
        "scheduled Adagrad": trained(accelerator_of(), scheduled=True, make=adagrad_of),
        "whole batch": _configured_by_torch(),
    }


def _configured_by_torch() -> Run:
    """Train as the configuration of `_configured` says."""
    accelerator = accelerator_of(2)
    batches = loader(accelerator)
    model: Any = decoder(0).float()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    # DeepSpeed's schedule takes its second step before it warms up.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(4, max(0, step - 1)) / 4)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return epoch(accelerator, model, optimizer, batches, schedule)


@pytest.fixture(scope="module")
def whole() -> dict[str, Run]:
    runs: dict[str, Run] = run_one(_whole)
    for losses, norms in runs.values():
        assert len(set(losses)) == len(losses)
        assert min(norms) > CLIP  # the clipping is active at every step
    return runs


def _stages() -> Seen:
    """All runs of `_whole` at every stage, in one world: each stage is a plug-in, each run an engine."""
    quiet()
    plugins = {str(stage): plugin(stage) for stage in STAGES}
    accelerator = accelerator_of(deepspeed_plugins=plugins)
    seen: Seen = {"type": str(accelerator.distributed_type), "runs": {}, "skipped": []}
    for stage in STAGES:
        accelerator.state.select_deepspeed_plugin(str(stage))
        for window in WINDOWS:
            accelerator = accelerator_of(window)
            seen["runs"][f"stage {stage}, window {window}"] = trained(accelerator, manual=window == 2)
        seen["runs"][f"stage {stage}, scheduled"] = trained(accelerator_of(), scheduled=True)
        # DeepSpeed builds this optimizer anew, without its schedule.
        seen["runs"][f"stage {stage}, scheduled Adagrad"] = trained(accelerator_of(), scheduled=True, make=adagrad_of)
        seen["skipped"].append(accelerator.optimizer_step_was_skipped)
    seen["runs"]["compiled, window 1"] = trained(accelerator_of(dynamo_backend="eager"))
    return seen


def test_losses_and_norms_are_those_of_one_process_at_every_stage(whole: dict[str, Run]) -> None:
    for seen in run(_stages):
        assert (seen["type"], seen["skipped"]) == ("DEEPSPEED", [False] * len(STAGES))
        assert_near(seen["runs"], whole, 1e-6)


class _Overflowing:
    """An engine in fp16, which needs a GPU: gradients overflow at the steps of ``overflows``."""

    def __init__(self, *overflows: bool) -> None:
        self.optimizer: Any = SimpleNamespace(overflow=False)
        self._overflows = iter(overflows)
        self._completes = False

    def set_gradient_accumulation_boundary(self, completes: bool) -> None:
        self._completes = completes

    def backward(self, loss: Any, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas

    def gradient_clipping(self) -> float:
        return 0.0

    def step(self) -> None:
        if self._completes:
            self.optimizer.overflow = next(self._overflows)


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    wrapper = DeepSpeedEngineWrapper(_Overflowing(False, True, False))
    skipped = []
    for completes in (True, True, False, True):
        wrapper.backward(torch.zeros(()), completes)
        skipped.append(wrapper.skipped)
    assert skipped == [False, True, True, False]


def _configuration() -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": CLIP,
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    }


def _configured(precision: str = "no") -> Seen:
    """An optimizer and a scheduler that the configuration describes, with the script's values."""
    quiet()
    plugin = DeepSpeedPlugin(_configuration())
    accelerator = accelerator_of(2, deepspeed_plugin=plugin, mixed_precision=precision)
    batches = loader(accelerator)
    model: Any = decoder(0).float()
    model.scale = model.scale.to(torch.bfloat16 if precision == "bf16" else torch.float32)  # DeepSpeed casts no buffers
    dummy = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1, betas=[0.8, 0.9])
    model, optimizer, schedule = accelerator.prepare(model, dummy, DummyScheduler(dummy, warmup_num_steps=4))
    engine = accelerator.deepspeed_engine_wrapped.engine
    first = accelerator.prepare(engine)
    losses = epoch(accelerator, model, optimizer, batches, schedule)
    return {
        "runs": {"configured, whole batch": losses},
        "same": (first is engine is model, accelerator.unwrap_model(model) is engine.module),
        "rates": schedule.get_last_lr(),
        "computed in": [accelerator.mixed_precision, engine.module.head.weight.dtype],
        "config": {
            key: accelerator.deepspeed_config[key]
            for key in (
                "train_micro_batch_size_per_gpu",
                "train_batch_size",
                "gradient_accumulation_steps",
                "optimizer",
            )
        },
    }


def test_a_configuration_with_optimizer_and_scheduler_is_filled_by_placeholders(whole: dict[str, Run]) -> None:
    for processes in (1, 2):
        for seen in run(_configured, processes=processes):
            assert (seen["same"], seen["rates"]) == ((True, True), [0.01])
            assert seen["config"] == {
                "train_micro_batch_size_per_gpu": ROWS // processes,
                "train_batch_size": 2 * ROWS,
                "gradient_accumulation_steps": 2,
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "torch_adam": True},
                },
            }
            assert seen["computed in"] == ["no", torch.float32]
            assert_near(seen["runs"], whole, 1e-6)


def test_an_engine_computes_in_the_requested_precision(whole: dict[str, Run]) -> None:
    seen = run_one(_configured, "bf16")
    assert seen["computed in"] == ["bf16", torch.bfloat16]
    losses, _ = seen["runs"]["configured, whole batch"]
    assert losses == pytest.approx(whole["whole batch"][0], abs=0.1)
    assert losses != pytest.approx(whole["whole batch"][0], abs=1e-5)
