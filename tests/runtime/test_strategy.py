"""The seam between the façade and a strategy: one of twenty lines, which no line of the façade knows, trains as DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from accel import Accelerator
from accel.parallel.base import Strategy

from .worlds import run, run_one


class Sharded(Strategy):
    """Shards models in place, and has optimizers step the shards, whichever of the two came first."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.shards: Any = WeakTensorKeyDictionary()
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def wrap(self, model: nn.Module) -> nn.Module:
        whole = dict(model.named_parameters())
        fully_shard(model)
        self.shards.update({whole[name]: shard for name, shard in model.named_parameters()})
        return model

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], *more: Any) -> Any:
        self.optimizers.update(optimizers)
        prepared = super().prepare(models, optimizers, *more)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["params"] = [self.shards.get(parameter, parameter) for parameter in group["params"]]
        return prepared


def _losses(sharded: bool, order: str, precision: str) -> list[float]:
    accelerator = Accelerator(mixed_precision=precision)
    if sharded:
        accelerator.strategy = Sharded(accelerator.state)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    if order == "one call":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    seen = []
    for step in range(10):
        torch.manual_seed(100 * step + accelerator.process_index)
        loss = model(torch.randn(6, 8)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_strategy_that_the_facade_does_not_know_trains_as_ddp_does(precision: str) -> None:
    expected = run(_losses, False, "one call", precision)
    assert expected[0] != expected[1]
    assert expected[0][-1] < expected[0][0]
    for order in ("one call", "model first", "optimizer first"):
        assert run(_losses, True, order, precision) == expected


def _prepared_again() -> list[bool]:
    accelerator = Accelerator()
    bare = nn.Linear(2, 2)
    sgd = torch.optim.SGD(bare.parameters())
    model, same, optimizer = accelerator.prepare(bare, bare, sgd)
    again, alike = accelerator.prepare(bare, sgd)
    return [
        model is same is again,
        optimizer is alike,
        accelerator.prepare(model) is model,
        accelerator.prepare_model(bare, evaluation_mode=True) is bare,
        len(accelerator._models) == len(accelerator._optimizers) == 1,
    ]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_prepared_again_is_what_the_first_call_made(processes: int) -> None:
    assert run(_prepared_again, processes=processes) == [[True] * 5] * processes


def _trained_after_its_evaluation() -> list[Any]:
    accelerator = Accelerator()
    bare = nn.Linear(2, 2)
    evaluated = accelerator.prepare_model(bare, evaluation_mode=True)
    model = accelerator.prepare(bare)
    return [evaluated is bare, type(model), [model] == accelerator._models]


def test_a_model_that_was_evaluated_first_is_spread_over_the_world_all_the_same() -> None:
    assert run(_trained_after_its_evaluation) == [[True, DistributedDataParallel, True]] * 2


def _ended() -> list[Any]:
    accelerator = Accelerator()
    told: list[str] = []

    def fail(what: str) -> Any:
        def end() -> None:
            told.append(what)
            raise RuntimeError(what)

        return end

    parts: Any = accelerator
    parts._end_preemption, parts._checkpoints.release = fail("preemption"), fail("checkpoint")
    parts._finish_trackers = fail("trackers")
    try:
        accelerator.end_training()
    except RuntimeError as error:
        context = error.__context__
        return [told, str(error), str(context)]
    return []


def test_the_end_of_training_does_all_of_its_list_and_raises_the_last_error() -> None:
    told, last, before = run_one(_ended)
    assert told == ["preemption", "checkpoint", "trackers"]
    assert (last, before) == ("trackers", "checkpoint")
