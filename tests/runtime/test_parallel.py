"""How gradients travel: communication hooks, regions without and with synchronisation, wrapped models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.big_models import cpu_offload
from accel.enums import DDPCommunicationHookType
from accel.errors import ArgumentError
from accel.parallel.base import Strategy
from accel.plugins import DistributedDataParallelKwargs, TorchDynamoPlugin
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin

from .worlds import outcomes, run, run_one

# 1 + 1/2048 lies between two neighbours in fp16, 1 + 1/256 in bf16; both are exact in fp32.
_FINE = {"no": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}


def _hooked(hook: str, wrapper: str, options: dict[str, Any]) -> list[list[float]]:
    kwargs = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=options)
    accelerator = Accelerator(kwargs_handlers=[kwargs])
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(16, 16, bias=False))
    seen = []
    for step in range(4):
        model.zero_grad()
        row = torch.full((1, 16), 1.0 + step + accelerator.process_index)
        accelerator.backward(model(row).sum())
        gathered = accelerator.gather(model.module.weight.grad[None])
        seen.append([float((gathered[0] == gathered[1]).all()), gathered[0].mean().item()])
    return seen


@pytest.mark.parametrize("wrapper", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("hook", ["fp16", "bf16", "power_sgd"])
def test_every_hook_averages_gradients(hook: str, wrapper: str) -> None:
    options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1} if hook == "power_sgd" else {}
    for seen in run(_hooked, hook, wrapper, options):
        assert [alike for alike, _ in seen] == [1.0] * 4
        # Gradients of rank one, which low-rank compression keeps.
        assert [mean for _, mean in seen] == pytest.approx([1.5, 2.5, 3.5, 4.5], rel=0.02)


def _rounded(hook: str) -> float:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.full((1, 1), 1.0 + _FINE[hook])).sum())
    gradient: float = model.module.weight.grad.item()
    return gradient


def test_hooks_send_short_numbers() -> None:
    assert run(_rounded, "no") == [1.0 + 2.0**-11] * 2
    assert run(_rounded, "fp16") == [1.0] * 2
    assert run(_rounded, "bf16") == [1.0] * 2


def test_the_batched_hook_works_or_is_refused_before_training() -> None:
    """In torch 2.13 it fails in the first backward pass that it compresses: its step takes matrices by the batch."""
    options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}
    for outcome in outcomes(_hooked, "batched_power_sgd", "no", options):
        if outcome.error is None:
            assert [mean for _, mean in outcome.value] == pytest.approx([1.5, 2.5, 3.5, 4.5], rel=0.02)
        else:
            assert outcome.error == "ArgumentError"
            assert outcome.message.endswith("use 'power_sgd'")


def test_hooks_that_do_not_exist_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"'powersgd' is not one of .*; did you mean 'power_sgd'"):
        DistributedDataParallelKwargs(comm_hook="powersgd")
    with pytest.raises(ArgumentError, match=r"comm_wrapper=…\): 'power_sgd' is not one of no, fp16, bf16"):
        DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.POWER_SGD)


def _gradient(model: Any) -> float:
    value: float = model.module.weight.grad.item()
    return value


def _late_sync() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    inputs = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        first, second = model(inputs).sum(), model(inputs).sum()
        accelerator.backward(first)
    alone = _gradient(model)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    together = _gradient(model)
    model.zero_grad()
    accelerator.backward(model(inputs).sum())
    return [alone, together, _gradient(model)]


def test_a_forward_without_synchronisation_can_have_a_backward_with_it() -> None:
    assert run(_late_sync) == [[1.0, 3.0, 1.5], [2.0, 3.0, 1.5]]


def _not_spread() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    return [model.weight.grad.item()]


def test_one_process_has_nothing_to_synchronise() -> None:
    assert run_one(_not_spread) == [1.0]


def _compiled_no_sync() -> list[float]:
    import warnings

    warnings.simplefilter("ignore")  # torch's tracer warns at itself
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    weight: Any = accelerator.unwrap_model(model, keep_torch_compile=False).weight
    inputs = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs).sum())
    alone = weight.grad.item()
    accelerator.backward(model(inputs).sum())
    return [alone, weight.grad.item()]


def test_a_compiled_model_rests_under_no_sync_too() -> None:
    first, second = run(_compiled_no_sync)
    assert [first[0], second[0]] == [1.0, 2.0]
    assert first[1] == second[1] == 3.0


def _several() -> list[bool]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    models = accelerator.prepare(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    inputs = torch.full((1, 1), 1.0 + accelerator.process_index)
    alike = []
    for _ in range(2):
        with accelerator.accumulate(*models):
            accelerator.backward(sum(model(inputs).sum() for model in models))
        for model in models:
            gathered = accelerator.gather(model.module.weight.grad)
            alike.append(bool((gathered[0] == gathered[1]).all()))
    return alike


def test_gradients_of_several_models_travel_together() -> None:
    assert run(_several) == [[False, False, True, True]] * 2


def _frozen() -> list[Any]:
    accelerator = Accelerator()
    frozen = nn.Linear(1, 1).requires_grad_(False)
    return [accelerator.prepare(frozen) is frozen, accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)]


def test_models_that_are_not_trained_are_not_wrapped() -> None:
    for same, evaluated in run(_frozen):
        assert same
        assert type(evaluated) is nn.Linear


def _unfrozen(sharded: bool, partly: bool) -> list[float]:
    """The gradients of weights that a pass with others came before: unfrozen, in a window of two batches."""
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=Plugin() if sharded else None)
    bare = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for weight in bare.parameters():
        nn.init.ones_(weight)
    (bare[0] if partly else bare).requires_grad_(False)
    model = accelerator.prepare(bare)
    inputs = torch.full((1, 1), 2.0 + 2 * accelerator.process_index)
    if partly:
        accelerator.backward(model(inputs).sum())
        model.zero_grad()
    bare.requires_grad_(True)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
    gradients: list[Any] = [weight.grad for weight in bare.parameters()]
    return [(gradient.full_tensor() if sharded else gradient).item() for gradient in gradients]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("partly", [False, True])
def test_gradients_of_weights_that_are_unfrozen_later_are_averaged(sharded: bool, partly: bool) -> None:
    assert run(_unfrozen, sharded, partly) == [[3.0, 3.0]] * 2


def _static_graph() -> list[float]:
    kwargs = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, kwargs_handlers=[kwargs])
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    seen = []
    for step in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 1.0 + step + accelerator.process_index)).sum())
            if accelerator.sync_gradients:
                seen.append(_gradient(model))
                model.zero_grad()
    return seen


def test_a_static_graph_is_trained_with_accumulation() -> None:
    assert run(_static_graph) == [[2.0, 4.0, 6.0]] * 2


def _prepared_twice(sharded: bool) -> list[Any]:
    warnings.simplefilter("ignore")  # torch's tracer warns at itself
    plugin = Plugin() if sharded else None
    model = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"), fsdp_plugin=plugin).prepare(
        bare := nn.Linear(1, 1, bias=False)
    )
    accelerator = Accelerator()
    again = accelerator.prepare(model)
    accelerator.backward(again(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
    gradient: Any = bare.weight.grad
    return [again is model, (gradient.full_tensor() if sharded else gradient).item()]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_compiled_model_of_one_accelerator_is_the_same_in_another(sharded: bool) -> None:
    assert run(_prepared_twice, sharded) == [[True, 1.5]] * 2


def _offloaded(sharded: bool, training: bool) -> list[Any]:
    accelerator = Accelerator(fsdp_plugin=Plugin() if sharded else None)
    model: Any = cpu_offload(nn.Linear(1, 1, bias=False))
    expected = model(torch.ones(1, 1)).tolist()
    if training:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    elif sharded:
        model = accelerator.prepare_model(model)
    else:
        model = accelerator.prepare_model(model, evaluation_mode=accelerator.num_processes > 1)
    return [model(torch.ones(1, 1)).tolist() == expected, model.weight.is_meta]


def test_an_offloaded_model_is_evaluated_where_it_is_and_not_trained() -> None:
    assert run_one(_offloaded, False, False) == [True, True]
    assert run(_offloaded, False, False) == [[True, True]] * 2
    for outcome in [*outcomes(_offloaded, False, True, processes=1), *outcomes(_offloaded, False, True)]:
        assert outcome.error == "ArgumentError"
        assert outcome.message.startswith("prepare: SGD has parameters on the meta device, such as those of an offload")
    for outcome in outcomes(_offloaded, True, False):
        assert outcome.message.startswith("prepare: a model that is offloaded, or dispatched over several devices, ")


def _dispatched(training: bool) -> bool:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model.hf_device_map = {"a": "cpu", "b": "disk"}  # type: ignore[assignment]
    spread = accelerator.verify_device_map(nn.Sequential(model))
    accelerator.prepare_model(model, evaluation_mode=not training)
    return spread and not accelerator.verify_device_map(nn.Linear(1, 1))


def test_a_dispatched_model_is_not_trained_by_several_processes() -> None:
    assert run_one(_dispatched, True)
    assert run(_dispatched, False) == [True, True]
    for outcome in outcomes(_dispatched, True):
        assert outcome.error == "ArgumentError"
        assert outcome.message.endswith("load it without device_map, or start one process")


def _lomo() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum(), learning_rate=0.1)


def test_lomo_is_refused_in_one_line() -> None:
    told = outcomes(_lomo, processes=1)[0]
    assert (told.error, told.message[:40]) == ("ArgumentError", "backward(learning_rate=…) is for LOMO op")


class Walked(nn.Linear):
    """Counts how often its parts are gone through."""

    walks = 0

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.walks += 1
        return super().named_modules(*args, **kwargs)

    def named_children(self) -> Any:
        self.walks += 1
        return super().named_children()


def _unwrapped() -> list[Any]:
    accelerator = Accelerator()
    raw = Walked(2, 1)
    model = accelerator.prepare(raw)
    before = raw.walks
    ways = [{}, {"keep_fp32_wrapper": False}, {"keep_torch_compile": False}]
    same = all(accelerator.unwrap_model(model, **way) is raw for way in ways for _ in range(3))
    return [same, accelerator.unwrap_model(raw) is raw, raw.walks - before, model(torch.ones(1, 2)).shape]


@pytest.mark.parametrize("processes", [1, 2])
def test_unwrapping_looks_at_the_wrappers_alone(processes: int) -> None:
    """So that it costs the same for every model, and a script may do it for every batch."""
    assert run(_unwrapped, processes=processes) == [[True, True, 0, (1, 1)]] * processes


def _joined_by_a_strategy_that_cannot() -> list[str]:
    accelerator = Accelerator()
    accelerator.strategy = Strategy(accelerator.state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([]):
            pass
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("processes", [1, 2])
def test_joining_warns_where_it_has_no_effect(processes: int) -> None:
    said = "join_uneven_inputs has no effect: it is for data-parallel training (DDP)"
    assert run(_joined_by_a_strategy_that_cannot, processes=processes) == [[said] * (processes > 1)] * processes


class Unmovable(nn.Linear):
    """Cannot be moved, as the 8-bit models of older releases of transformers."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("places", "cpu", "message"),
    [
        ({"": "cpu"}, True, None),
        ({"": "cpu"}, False, "with parts on the CPU or the disk"),
        ({"a": 0, "b": torch.device("cpu")}, False, "with parts on the CPU or the disk"),
        ({"": 0}, False, None),
        ({"": "cuda:1"}, True, "is on cuda:1 and this process trains on cpu"),
        ({"a": "cpu", "b": "disk"}, True, "with parts on the CPU or the disk"),
    ],
)
def test_a_quantised_model_on_another_device_is_refused(
    places: dict[str, Any], cpu: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.accelerator.is_bitsandbytes_multi_backend_available", lambda: cpu, raising=False)
    model: Any = Unmovable(1, 1)
    model.is_loaded_in_8bit = True
    model.hf_device_map = places
    accelerator = Accelerator(cpu=True)
    if message is None:
        assert accelerator.prepare(model) is model
        return
    with pytest.raises(ArgumentError, match=message):
        accelerator.prepare(model)


class _WithBuffer(nn.Linear):
    shift: torch.Tensor

    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("shift", shift)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + self.shift


_OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand": lambda base: base[0].expand(2),
    "unfold": lambda base: base.unfold(0, 2, 1),
    "as_strided": lambda base: base.as_strided((2, 2), (3, 3)),  # its span is larger than its number of elements
}


def _received(kind: str, sharded: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
    bare = _WithBuffer(_OVERLAPPING[kind](torch.full((8,), float(accelerator.process_index))))
    model: Any = accelerator.prepare(bare)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    unwrapped: Any = accelerator.unwrap_model(model)
    return sorted(set(unwrapped.shift.flatten().tolist()))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", _OVERLAPPING)
def test_buffers_whose_elements_share_memory_are_received(kind: str, sharded: bool) -> None:
    assert run(_received, kind, sharded) == [[0.0]] * 2


def _kept_views() -> list[bool]:
    base = torch.zeros(4, 4)
    views = [base[1:, ::2], base.T, base[:, 1], base[0, 0], base[:0], base.expand(1, 4, 4)]
    models: Any = Accelerator(cpu=True).prepare(*map(_WithBuffer, views))
    return [model.shift is view for model, view in zip(models, views, strict=True)]


def test_slices_of_a_buffer_stay_views() -> None:
    assert run_one(_kept_views) == [True] * 6
