"""Loading in the middle of a window, and beside hooks and criteria: the rest of the run is not touched by either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.plugins import GradientAccumulationPlugin
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from tests.runtime.small import renew_manifest
from tests.runtime.worlds import run

from .training import decoder, train


def _held_back(folder: str, replicas: int) -> tuple[list[float], list[float]]:
    accelerator: Any = Accelerator(
        fsdp_plugin=Plugin(),
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas) if replicas > 1 else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3),
    )
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    train(accelerator, model, optimizer, steps=3)
    accelerator.save_state(folder)
    expected, _ = train(accelerator, model, optimizer, steps=6, first=3)
    train(accelerator, model, optimizer, steps=2, first=50)  # leaves gradients in an open window
    accelerator.load_state(folder)
    return expected, train(accelerator, model, optimizer, steps=6, first=3)[0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_that_torch_holds_back_go_when_a_checkpoint_is_loaded(replicas: int, tmp_path: Path) -> None:
    expected, after = run(_held_back, str(tmp_path / "here"), replicas, processes=2 * replicas)[0]
    assert after == expected


def _held_back_in_another_type(folder: str) -> tuple[bool, bool]:
    """Gradients in 16 bits that torch adds up in 32: are they held back before the load, and the same steps after?"""
    windows = GradientAccumulationPlugin(num_steps=3)
    accelerator: Any = Accelerator(fsdp_plugin=Plugin(), mixed_precision="bf16", gradient_accumulation_plugin=windows)
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def steps(count: int, value: float) -> list[Any]:
        for _ in range(count):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((2, 4), value)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [tensor.tolist() for tensor in accelerator.get_state_dict(model).values()]

    steps(3, 1.0)
    accelerator.save_state(folder)
    expected = steps(3, 2.0)
    steps(2, 50.0)  # leaves gradients in an open window
    held = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    is_held = all(parameter.unsharded_accumulated_grad is not None for parameter in held)
    accelerator.load_state(folder)
    return is_held, steps(3, 2.0) == expected


def test_gradients_that_torch_adds_up_in_another_type_go_too(tmp_path: Path) -> None:
    assert run(_held_back_in_another_type, str(tmp_path / "here")) == [(True, True)] * 2


def _hooked(folder: str, sharded: bool, old: bool) -> list[bool]:
    """Three models of which hooks keep the first, and a criterion, in an open window."""
    plugin = Plugin() if sharded else None
    windows = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    accelerator: Any = Accelerator(fsdp_plugin=plugin, gradient_accumulation_plugin=windows)
    torch.manual_seed(0)
    first: Any = nn.Linear(2, 2)
    second: Any = nn.Linear(2, 2)
    third: Any = nn.Linear(2, 2)
    parameters = [*first.parameters(), *second.parameters(), *third.parameters()]
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.1)
    first, second, criterion, third, optimizer = accelerator.prepare(first, second, nn.MSELoss(), third, optimizer)
    kept: dict[str, torch.Tensor] = {}

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        kept.update({name: value.clone() for name, value in first.state_dict().items()})
        assert models.pop(0) is first
        weights.pop(0)

    def load(models: list[Any], directory: str) -> None:
        models.pop(0)
        first.load_state_dict(kept)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)

    def step(count: int) -> None:
        for _ in range(count):
            with accelerator.accumulate(first, second, third):
                rows = torch.ones(2, 2)
                accelerator.backward(criterion(third(second(first(rows))), rows))
                optimizer.step()
                optimizer.zero_grad()

    def state() -> str:
        gradients = [
            getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for m in (first, second, third) for p in m.parameters()
        ]
        weights = [accelerator.get_state_dict(model) for model in (first, second, third)]
        return str([weights, gradients, accelerator.strategy.optimizer_state(optimizer)])

    step(5)
    accelerator.save_state(folder)
    if old and accelerator.is_main_process:  # accel once numbered the models that were left
        for number in (1, 2, 3):
            (Path(folder) / f"model_{number}.safetensors").rename(
                Path(folder) / ("model.safetensors" if number == 1 else f"model_{number - 1}.safetensors")
            )
        renew_manifest(Path(folder), schema=2)
    accelerator.wait_for_everyone()
    before = state()
    step(1)
    assert state() != before
    accelerator.load_state(folder)
    return [state() == before]


def _full(gradient: Any) -> Any:
    return getattr(gradient, "full_tensor", lambda: gradient)()


@pytest.mark.parametrize(("sharded", "old"), [(True, False), (False, False), (False, True)])
def test_hooks_that_take_a_model_change_no_names(sharded: bool, old: bool, tmp_path: Path) -> None:
    assert run(_hooked, str(tmp_path / "here"), sharded, old)[0][0]


def _window(folder: str, save: bool) -> list[Any]:
    """A window with dense and sparse gradients, each process its own, and a schedule that counts in NumPy."""
    accelerator: Any = Accelerator(gradient_accumulation_steps=2)
    model: Any = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=numpy.float64(0.1))
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: numpy.float64(1) / (1 + step))
    accelerator.prepare(schedule)
    parameters = list(accelerator.unwrap_model(model).parameters())
    if save:
        with accelerator.accumulate(model):
            pass
        for number, parameter in enumerate(parameters):
            value = torch.full_like(parameter, number + 1.0 + accelerator.process_index)
            parameter.grad = value if number else value.to_sparse()
        accelerator.save_state(folder)
        return []
    accelerator.load_state(folder)
    gradients = [parameter.grad for parameter in parameters]
    return [[gradient.to_dense().unique().tolist() for gradient in gradients], gradients[0].is_sparse, accelerator.step]


def test_a_window_in_another_world_has_the_mean_of_all_gradients(tmp_path: Path) -> None:
    folder = str(tmp_path / "here")
    run(_window, folder, True)
    own = run(_window, folder, False)
    assert own == [[[[1], [2], [3]], True, 1], [[[2], [3], [4]], True, 1]]
    mean = [[1.5], [2.5], [3.5]]
    assert run(_window, folder, False, processes=3) == [[mean, True, 1]] * 3
