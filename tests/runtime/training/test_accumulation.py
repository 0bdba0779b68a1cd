"""Steps: accumulation, schedulers, clipping, precision; on one process and two."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from accel.errors import AccelError
from accel.gradient_state import GradientState
from accel.plugins import GradScalerKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.state import AcceleratorState
from accel.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler

from ..worlds import outcomes, run, run_one


def ones(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 1), torch.arange(samples, dtype=torch.float32)[:, None])


def _gradients(batches: int, steps: int, split: bool, sync_each: bool = False, sized: bool = True) -> list[float]:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=sync_each)
    config = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, dataloader_config=config)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ones(2 * batches), batch_size=2))
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    seen += [p.grad.item() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
    return seen


def _expected(batches: int, steps: int) -> list[float]:
    data = torch.arange(2 * batches, dtype=torch.float64).reshape(batches, 2)
    windows = [data[start : start + steps] for start in range(0, batches, steps)]
    return [-2 * window.mean().item() for window in windows] * 2


@pytest.mark.parametrize(("batches", "steps"), [(3, 2), (4, 2), (5, 3), (2, 4), (4, 1)])
def test_a_window_counts_as_what_it_is(batches: int, steps: int) -> None:
    """Accelerate's defect 6: the last short window was divided by the full number of steps."""
    assert run_one(_gradients, batches, steps, False) == pytest.approx(_expected(batches, steps))


def test_windows_are_the_same_on_two_processes() -> None:
    for seen in run(_gradients, 5, 3, True):
        assert seen == pytest.approx(_expected(5, 3))
    for seen in run(_gradients, 5, 3, True, True):
        assert seen == pytest.approx(_expected(5, 3))


def _windows(sync_with_dataloader: bool) -> list[list[bool]]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=sync_with_dataloader)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(ones(6), batch_size=2))
    epochs = []
    for _ in range(2):
        seen = []
        for _batch in loader:
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
        epochs.append(seen)
    return epochs


def test_a_window_ends_with_its_loader_or_goes_on_in_the_next_epoch() -> None:
    assert run_one(_windows, True) == [[False, True, True], [False, True, True]]
    assert run_one(_windows, False) == [[False, True, False], [True, False, True]]


def _quiet() -> list[bool]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(ones(12), batch_size=2))
    alike = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(((model(inputs) - targets * (accelerator.process_index + 1)) ** 2).mean())
        gradient = accelerator.gather(model.module.weight.grad)
        alike.append(bool((gradient[0] == gradient[1]).all()))
    return alike


def test_gradients_travel_with_the_last_batch_of_a_window_only() -> None:
    assert run(_quiet) == [[False, True, True]] * 2  # 3 batches a process: a window of two, and one of one


def _rates(split: bool, steps: int, with_optimizer: bool = True) -> list[Any]:
    accelerator = Accelerator(
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
        step_scheduler_with_optimizer=with_optimizer,
    )
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    loader = DataLoader(ones(16), batch_size=2)
    scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
    rates = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_schedules_move_as_often_as_batches_are_used() -> None:
    assert run_one(_rates, False, 1) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run_one(_rates, False, 2) == [0, 1, 1, 2, 2, 3, 3, 4]
    assert run(_rates, False, 1)[1] == [2, 4, 6, 8]
    assert run(_rates, True, 1)[1] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run(_rates, False, 1, False)[1] == [1, 2, 3, 4]


def _past_the_end() -> float:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    rate: float = scheduler.get_last_lr()[0]
    return rate


def test_several_steps_at_once_do_not_overshoot_a_schedule_of_fixed_length() -> None:
    assert run(_past_the_end)[0] < 0.01


def _plateau() -> list[float]:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(raw, patience=2)
    model, optimizer, scheduler = accelerator.prepare(model, raw, schedule)
    rates = []
    for _ in range(6):
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_measurement_counts_once_on_any_number_of_processes() -> None:
    assert run(_plateau) == [[1.0, 1.0, 1.0, 0.1, 0.1, 0.1]] * 2


def _wrappers() -> list[Any]:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
    raw = torch.optim.AdamW(groups, lr=0.1)
    model, optimizer = accelerator.prepare(model, raw)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    return [
        isinstance(optimizer, torch.optim.Optimizer),
        isinstance(optimizer, AcceleratedOptimizer),
        isinstance(scheduler, AcceleratedScheduler),
        optimizer.param_groups is raw.param_groups,
        optimizer.state is raw.state,
        [group["lr"] for group in raw.param_groups],
        optimizer.step_was_skipped,
        accelerator.prepare(optimizer) is optimizer and accelerator.prepare(model) is model,
        accelerator.unwrap_model(model) is model,
        pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"],
    ]


def test_wrappers_are_what_they_wrap() -> None:
    assert run_one(_wrappers) == [True, True, True, True, True, pytest.approx([0.05, 0.01]), False, True, True, 0.05]


def _hot_path() -> list[str]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(
        nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), DataLoader(ones(16), batch_size=2)
    )
    found: list[str] = []
    batches = iter(loader)
    for number, (inputs, targets) in enumerate(batches):
        if number == 2:
            for module, name in ((importlib.util, "find_spec"), (inspect, "signature")):
                setattr(module, name, lambda *_, _name=name: found.append(_name))
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.unwrap_model(model)
    return found


def test_a_step_discovers_nothing() -> None:
    assert run_one(_hot_path) == []


def _clipped() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    accelerator.backward((model(torch.ones(1, 2)) * 30 * (accelerator.process_index + 1)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    return [norm, after, max(p.grad.max().item() for p in model.parameters())]


def test_clipping_sees_whole_gradients() -> None:
    for norm, after, most in run(_clipped):
        assert norm == pytest.approx(45 * 2**0.5)
        assert after == pytest.approx(1.0, abs=1e-4)
        assert most == pytest.approx(0.1)


def _uneven() -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=True))
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(ones(5), batch_size=1))
    counts = []
    with accelerator.join_uneven_inputs([model], even_batches=False):
        counts.append(0)
        for inputs, _ in loader:
            accelerator.backward(model(inputs).sum())
            counts[0] += 1
    counts.append(len(list(loader)))
    return counts


def test_uneven_inputs_do_not_hang_on_a_cpu() -> None:
    """Accelerate's defect 3: the region did nothing on CPU, and the longer process waited for ever."""
    assert run(_uneven) == [[3, 3], [2, 3]]


def _uneven_windows() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(ones(7), batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).sum())


def test_uneven_inputs_and_windows_exclude_each_other() -> None:
    for outcome in outcomes(_uneven_windows):
        assert outcome.error == "ArgumentError"
        assert outcome.message == (
            "join_uneven_inputs: processes must not end within a window of 2 accumulated batches: remove it and keep "
            "even_batches=True, or do not accumulate"
        )


def _outside_a_window() -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), DataLoader(ones(5), batch_size=1))

    def divisor() -> float:
        model.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        return float(round(1 / model.weight.grad.item()))

    seen: list[Any] = [divisor()]
    for _ in loader:  # a window of 4 and one of 1
        with accelerator.accumulate(model):
            seen.append(divisor())
    seen.append(divisor())
    with accelerator.accumulate(model):
        seen.append(accelerator.sync_gradients)
    accelerator.free_memory()
    return [*seen, accelerator.sync_gradients]


def test_what_is_outside_a_window_is_divided_by_the_steps_and_synchronised() -> None:
    assert run_one(_outside_a_window) == [4, 4, 4, 4, 4, 1, 4, False, True]


def _several_accelerators() -> list[Any]:
    plugin = Plugin(reshard_after_forward=False)
    Accelerator(gradient_accumulation_steps=3, fsdp_plugin=plugin)
    second = Accelerator()
    seen: list[Any] = [second.gradient_accumulation_steps, second.state.fsdp_plugin is plugin]
    seen.append(Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps)
    AcceleratorState._reset_state()
    return [*seen, Accelerator().gradient_accumulation_steps]


def test_what_a_second_accelerator_is_not_given_stays() -> None:
    assert run_one(_several_accelerators) == [3, True, 2, 1]


def _triggered() -> list[bool]:
    accelerator = Accelerator()
    seen = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_is_seen_by_all_once() -> None:
    assert run(_triggered) == [[False, True, False]] * 2
    assert run_one(_triggered) == [False, False, False]


def _freed() -> list[Any]:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    model, optimizer = accelerator.free_memory(model, optimizer)
    return [model, optimizer, accelerator._models, accelerator._optimizers]


def test_free_memory_lets_go() -> None:
    assert run_one(_freed) == [None, None, [], []]


def _kept_by_free_memory(sharded: bool) -> list[str]:
    """The kinds of objects that live on after a step and `free_memory`."""
    accelerator = Accelerator(fsdp_plugin=Plugin() if sharded else None)
    model: Any = nn.Linear(1, 1)
    parts = (model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(ones(2), batch_size=1))
    model, optimizer, loader = accelerator.prepare(*parts)
    references = [weakref.ref(item) for item in (*parts, model, optimizer, loader)]
    del parts
    for rows, _ in loader:
        accelerator.backward(model(rows).sum())
        optimizer.step()
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    gc.collect()
    return [type(item).__name__ for item in (reference() for reference in references) if item is not None]


def test_free_memory_frees_what_was_prepared() -> None:
    assert run_one(_kept_by_free_memory, False) == []
    assert run(_kept_by_free_memory, False) == [[], []]
    assert run(_kept_by_free_memory, True) == [[], []]


def _refusals() -> list[str]:
    told = []
    attempts: list[dict[str, Any]] = [
        {"mixed_precison": "bf16"},
        {"fsdp_plugin": object()},
        {"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]},
        {"kwargs_handlers": ["text"]},
        {"gradient_accumulation_steps": 0},
        {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
    ]
    for arguments in attempts:
        try:
            Accelerator(**arguments)
        except AccelError as error:
            told.append(str(error))
    return told


def test_arguments_that_cannot_be_used_are_named() -> None:
    known = "Autocast DistributedDataParallel GradScaler InitProcessGroup Profile AORecipe TERecipe MSAMPRecipe"
    handlers = ", ".join(f"{name}Kwargs" for name in known.split())
    assert run_one(_refusals) == [
        "Accelerator(mixed_precison=…) is unknown; did you mean 'mixed_precision'?",
        "Accelerator(fsdp_plugin=…) must be a FullyShardedDataParallelPlugin, not object",
        "kwargs_handlers: GradScalerKwargs is given twice",
        f"kwargs_handlers: str is not one of {handlers}",
        "gradient accumulation steps must be a positive integer, got 0",
        "pass gradient_accumulation_steps or gradient_accumulation_plugin, not both",
    ]


def _steps_from_env() -> int:
    return Accelerator().gradient_accumulation_steps


def test_accumulation_steps_come_from_the_environment() -> None:
    assert run_one(_steps_from_env, env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}) == 3
    assert run_one(_steps_from_env, env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"}) == 1


def test_the_plugins_values_are_those_that_were_given() -> None:
    state = GradientState()
    assert state.plugin_kwargs == {}
    assert GradientState(GradientAccumulationPlugin(num_steps=1)).plugin_kwargs == {"num_steps": 1}
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    assert GradientState(plugin).plugin_kwargs == state.plugin_kwargs == {"num_steps": 2, "sync_with_dataloader": False}
    state.plugin_kwargs = {"num_steps": 4}
    assert (GradientState().num_steps, state.plugin_kwargs) == (4, {"num_steps": 4})
