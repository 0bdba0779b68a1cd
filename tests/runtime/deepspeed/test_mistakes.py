"""Mistakes with DeepSpeed's engine are one line with the remedy, on every process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, DummyOptim, DummyScheduler
from accel.plugins.deepspeed import DeepSpeedPlugin
from tests import needs
from tests.runtime.sharding.training import decoder, loss_of
from tests.runtime.worlds import outcomes, run, run_one

from .training import accelerator_of, loader, message_of, optimizer_of, plugin, quiet

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")


def _model() -> Any:
    return decoder(0).float()


_BATCH_1 = {"train_micro_batch_size_per_gpu": 1}


def _config(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **_BATCH_1, **more}


def _before() -> dict[str, str]:
    """Mistakes at `prepare`, on one `Accelerator`, which stays usable."""
    quiet()
    plugins = {
        "two": plugin(2),
        "optimizer": DeepSpeedPlugin(_config(optimizer={"type": "AdamW", "params": {"lr": 0.1}})),
        "scheduler": DeepSpeedPlugin(_config(scheduler={"type": "WarmupLR", "params": {}})),
        "both": DeepSpeedPlugin(
            _config(optimizer={"type": "AdamW", "params": {}}, scheduler={"type": "WarmupLR", "params": {}})
        ),
        "batch": DeepSpeedPlugin(_config(train_batch_size=7)),
        "hidden": DeepSpeedPlugin({**_BATCH_1, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}),
    }
    accelerator: Any = Accelerator(cpu=True, deepspeed_plugins=plugins)
    model = _model()
    optimizer = optimizer_of(model)

    def with_plugin(name: str, *objects: Any) -> Callable[[], Any]:
        def prepare() -> None:
            accelerator.state.select_deepspeed_plugin(name)
            Accelerator().prepare(*objects)

        return prepare

    def callable_scheduler(optimizer: Any) -> Any:
        return None

    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {
        "no loader": message_of(lambda: accelerator.prepare(model, optimizer)),
        "optimizer alone": message_of(lambda: accelerator.prepare(optimizer)),
        "placeholder alone": message_of(lambda: accelerator.prepare(DummyOptim(model.parameters()))),
        "schedule alone": message_of(lambda: accelerator.prepare_scheduler(DummyScheduler(optimizer))),
        "no optimizer": message_of(with_plugin("scheduler", model)),
        "two models": message_of(with_plugin("two", model, _model(), optimizer)),
        "optimizer twice": message_of(with_plugin("optimizer", model, optimizer)),
        "no such optimizer": message_of(with_plugin("scheduler", model, DummyOptim(model.parameters()))),
        "scheduler twice": message_of(
            with_plugin(
                "scheduler", model, optimizer, DummyScheduler(optimizer, lr_scheduler_callable=callable_scheduler)
            )
        ),
        "scheduler of torch": message_of(with_plugin("scheduler", model, optimizer, schedule)),
        "scheduler of another": message_of(with_plugin("optimizer", model, DummyOptim(model.parameters()), schedule)),
        "both": message_of(with_plugin("both", model, DummyOptim(model.parameters()), schedule)),
        "no such scheduler": message_of(with_plugin("optimizer", model, DummyScheduler(optimizer))),
        "two schedulers": message_of(
            with_plugin("scheduler", model, optimizer, DummyScheduler(optimizer), DummyScheduler(optimizer))
        ),
        "batch": message_of(with_plugin("batch", model, optimizer)),
        "hidden": message_of(with_plugin("hidden", model, optimizer)),
        "backward": message_of(lambda: accelerator.backward(torch.ones((), requires_grad=True))),
        "torch's own": message_of(lambda: accelerator.prepare(schedule)),
    }


def test_a_mistake_at_prepare_is_one_line() -> None:
    seen = run_one(_before)
    for name, words in {
        "no loader": "no value for 'auto' in train_batch_size, train_micro_batch_size_per_gpu: set numbers",
        "optimizer alone": "a AdamW and its model must come in one call",
        "placeholder alone": "a DummyOptim and its model must come in one call",
        "schedule alone": "a DummyScheduler and its model must come in one call",
        "no optimizer": "a model and its optimizer must come in one call",
        "two models": "an Accelerator trains one model by one optimizer: make another Accelerator",
        "optimizer twice": "an optimizer is in the DeepSpeed configuration and in the script",
        "no such optimizer": "a DummyOptim stands for the optimizer in the DeepSpeed configuration, which has none",
        "scheduler twice": "a scheduler is in the DeepSpeed configuration and in the script",
        "scheduler of torch": "a scheduler is in the DeepSpeed configuration and in the script: remove one",
        "scheduler of another": "the ConstantLR steps an optimizer of the script, but the optimizer is in ",
        "both": "a scheduler is in the DeepSpeed configuration and in the script: remove one",
        "no such scheduler": "a DummyScheduler stands for the scheduler in the DeepSpeed configuration, which has none",
        "two schedulers": "an engine of DeepSpeed steps one scheduler",
        "batch": "train_batch_size is 7, which does not fit 1 rows × 1 steps × 1 processes",
        "hidden": "no value for 'auto' in zero_optimization.reduce_bucket_size",
        "backward": "prepare the model and its optimizer in one call first",
        "torch's own": "no error",
    }.items():
        assert words in seen[name], (name, seen[name])
        assert "\n" not in seen[name]


def _during() -> dict[str, str]:
    """Mistakes in a training step."""
    quiet()
    accelerator = accelerator_of(2, deepspeed_plugin=plugin(2))
    batches = loader(accelerator)
    model = _model()
    engine, optimizer = accelerator.prepare(model, optimizer_of(model))
    seen = {}
    for number, rows in enumerate(batches):
        with accelerator.accumulate(engine):
            accelerator.backward(loss_of(engine, rows))
            if number == 0:
                seen["open"] = message_of(lambda: accelerator.clip_grad_norm_(engine.parameters(), 0.3))
                continue
        seen["limit"] = message_of(lambda: accelerator.clip_grad_norm_(engine.parameters(), 1.0))
        seen["kind"] = message_of(lambda: accelerator.clip_grad_norm_(engine.parameters(), 0.3, norm_type=1))
        seen["value"] = message_of(lambda: accelerator.clip_grad_value_(engine.parameters(), 0.3))
        seen["closure"] = message_of(lambda: optimizer.step(lambda: None))
        seen["second"] = message_of(lambda: accelerator.prepare(other := _model(), optimizer_of(other)))
        with accelerator.no_sync(engine):
            seen["no_sync"] = message_of(lambda: accelerator.clip_grad_norm_(engine.parameters(), 0.3))
        break

    def joined() -> None:
        with accelerator.join_uneven_inputs([engine]):
            pass

    seen["join"] = message_of(joined)
    return seen


def test_a_mistake_in_training_is_one_line() -> None:
    for seen in run(_during):
        for name, words in {
            "open": "clip_grad_norm_ in the middle of an accumulation window",
            "no_sync": "clip_grad_norm_ in the middle of an accumulation window",
            "limit": "clip_grad_norm_(1.0): DeepSpeed clips in its own step, in this run to a 2-norm of 0.3: set",
            "kind": "clip_grad_norm_(0.3, norm_type=1): DeepSpeed clips in its own step",
            "value": "clip_grad_value_: DeepSpeed clips norms only: set DeepSpeedPlugin(gradient_clipping=…)",
            "closure": "step(closure): under DeepSpeed the backward pass steps",
            "second": "an Accelerator trains one model by one optimizer",
            "join": "under DeepSpeed all processes must run the same number of batches",
        }.items():
            assert words in seen[name], (name, seen[name])


def _half() -> None:
    Accelerator(cpu=True, mixed_precision="fp16", deepspeed_plugin=plugin(1))


def _absent() -> None:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]  # as if it were not installed
    Accelerator(cpu=True, deepspeed_plugin=plugin(1))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (_half, "DeepSpeed: fp16 needs a GPU, but this process uses the CPU: use bf16 or no"),
        (_absent, "deepspeed_plugin: DeepSpeed is not installed: pip install 'accel-launch[deepspeed]'"),
    ],
)
def test_what_a_machine_lacks_is_one_line(mistake: Callable[[], None], words: str) -> None:
    assert [outcome.message for outcome in outcomes(mistake, processes=1)] == [words]


def test_a_criterion_and_a_frozen_model_stay_whole() -> None:
    assert run_one(_beside) == [True, True, "DeepSpeedEngine", True]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(rows) + self.second(rows)
        return output


def _beside() -> list[Any]:
    quiet()
    accelerator: Any = accelerator_of(deepspeed_plugin=plugin(3, transformer_moe_cls_names="_Experts"))
    loader(accelerator)
    model: Any = nn.Sequential(nn.Linear(2, 2), _Experts())
    teacher, criterion = nn.Linear(2, 2).requires_grad_(False), nn.MSELoss()
    engine, frozen, same, _ = accelerator.prepare(model, teacher, criterion, optimizer_of(model))
    rows = torch.ones(2, 2)
    accelerator.backward(same(engine(rows), frozen(rows)))
    from deepspeed.utils import z3_leaf_module

    return [frozen is teacher, same is criterion, type(engine).__name__, z3_leaf_module(model[1])]
