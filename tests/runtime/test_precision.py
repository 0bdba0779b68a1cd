"""Mixed precision: what is computed in which type, scaled losses, steps left out, and what takes it off again."""

from __future__ import annotations

import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.errors import StateError
from accel.plugins import AutocastKwargs, GradScalerKwargs
from accel.precision import HalfPrecision, LowPrecision
from accel.precision.outputs import ConvertOutputsToFp32, convert_outputs_to_fp32
from accel.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler

from .worlds import outcomes, run, run_one


def _bf16() -> list[Any]:
    accelerator = Accelerator(mixed_precision="bf16")
    inner: list[Any] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            hidden = self.layer(x)
            inner.append(hidden.dtype)
            return {"logits": hidden, "kept": "text", "ids": torch.ones(1, dtype=torch.int64)}

    raw = Model()
    model = accelerator.prepare(raw)
    outputs = model(torch.ones(2, 4))
    with accelerator.autocast():
        inside = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    unwrapped(torch.ones(2, 4))
    return [
        inner, outputs["logits"].dtype, outputs["kept"], outputs["ids"].dtype, inside, unwrapped is raw,
        "forward" in vars(raw), raw.layer.weight.dtype,
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_bf16_computes_short_and_returns_fp32(processes: int) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for seen in run(_bf16, processes=processes):
        assert seen == [[bf16, fp32], fp32, "text", torch.int64, bf16, True, False, fp32]


def _fp16_on_cpu() -> None:
    Accelerator(mixed_precision="fp16")


def test_fp16_without_a_gpu_is_one_line() -> None:
    ended = outcomes(_fp16_on_cpu, processes=1, env={"ACCELERATE_USE_CPU": "1"})[0]
    assert ended.error == "PrecisionError"
    assert ended.message == "mixed_precision='fp16' needs a GPU, but this process uses cpu: use 'bf16' or 'no'"


def half(**scaling: Any) -> HalfPrecision:
    return HalfPrecision(torch.device("cpu"), None, GradScalerKwargs(init_scale=8.0, **scaling))


def test_the_scaler_leaves_out_steps_that_overflowed_and_tells_the_scheduler() -> None:
    precision = half(growth_interval=1)
    weight = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), precision=precision)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1), optimizer)
    precision.backward((weight * 2).sum())
    assert weight.grad is not None
    assert weight.grad.item() == 16.0
    optimizer.step()
    scheduler.step()
    assert not optimizer.step_was_skipped
    assert weight.item() == 0.0
    optimizer.zero_grad()
    precision.backward((weight * float("inf")).sum())
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 16.0
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert weight.item() == 0.0
    assert scheduler.get_last_lr() == [0.05]
    precision.finish_pending()
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 8.0


def test_a_scaler_that_is_off_trains_as_without_one() -> None:
    precision = half(enabled=False)
    weight = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), precision=precision)
    for _ in range(2):
        precision.backward(weight.sum())
        optimizer.step()
        optimizer.zero_grad()
    assert (weight.item(), optimizer.step_was_skipped) == (0.0, False)


def test_an_optimizer_with_a_scaler_of_the_script_tells_skipped_steps() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), scaler=scaler)
    for factor in (1.0, float("inf")):
        scaler.scale(weight.sum() * factor).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert optimizer.step_was_skipped is (factor != 1.0)
    assert (weight.item(), optimizer.scaler) == (0.5, scaler)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that are read of tensors: on a GPU each one waits for the device."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "scheduled", "reads"), [(False, False, 1), (False, True, 1), (True, False, 0),
                                                           (True, True, 1)])  # fmt: skip
def test_a_step_reads_no_more_numbers_than_by_hand(fused: bool, scheduled: bool, reads: int) -> None:
    precision = half()
    weight = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5, fused=fused), precision=precision)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1), optimizer)
    for factor in (1.0, float("inf")):
        with _Reads() as seen:  # type: ignore[no-untyped-call]
            precision.backward(weight.sum() * factor)
            precision.unscale(optimizer.optimizer)
            optimizer.step()
            if scheduled:
                scheduler.step()
        assert seen.count == reads
        precision.finish_pending()
        assert optimizer.step_was_skipped is (factor != 1.0)
    assert weight.item() == 0.5


def test_a_skipped_fused_step_is_seen_after_the_scale_was_updated_for_all() -> None:
    precision = half()
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [AcceleratedOptimizer(torch.optim.SGD([w], lr=1.0, fused=True), precision=precision) for w in weights]
    precision.backward(weights[0].sum() + weights[1].sum() * float("inf"))
    for optimizer in optimizers:
        optimizer.step()
    precision.finish_pending()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]


def test_two_optimizers_share_one_scale_and_are_unscaled_once() -> None:
    precision = half()
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [AcceleratedOptimizer(torch.optim.SGD([w], lr=1.0), precision=precision) for w in weights]
    precision.backward(weights[0].sum() * 3 + weights[1].sum() * 5)
    for _ in range(2):
        for optimizer in optimizers:
            precision.unscale(optimizer.optimizer)
    for optimizer in optimizers:
        optimizer.step()
    assert [weight.item() for weight in weights] == [-2.0, -4.0]


def test_wrapping_twice_is_as_once_and_pickles() -> None:
    model = nn.Linear(2, 2)
    precision = LowPrecision(torch.device("cpu"), torch.bfloat16)
    precision.wrap_forward(model)
    once = vars(model)["forward"]
    precision.wrap_forward(model)
    assert vars(model)["forward"] is once
    assert pickle.loads(pickle.dumps(model))(torch.ones(1, 2)).dtype is torch.float32


def _scaled_loop() -> list[Any]:
    """A whole loop with fp16's scaler, which torch has for the CPU too; only the choice of it is made by hand."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    accelerator.precision = half()
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(weight, optimizer, schedule)
    seen: list[Any] = []
    for batch, value in enumerate((1.0, 3.0, 1.0, float("inf"), 2.0, 2.0)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value)).sum())
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            elif batch == 0:
                try:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                except StateError as error:
                    seen.append(str(error))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped = accelerator.optimizer_step_was_skipped
            seen.append([skipped, weight.weight.item(), round(scheduler.get_last_lr()[0], 4)])
    return seen


def test_a_skipped_step_is_told_to_the_scheduler_in_a_whole_loop() -> None:
    refused, first, after_first, second, after_second, third, after_third = run_one(_scaled_loop)
    wanted = "clip_grad_norm_ in the middle of an accumulation window: put it under `if accelerator.sync_gradients:`"
    assert refused == wanted
    # Windows are means: of 1 and 3, of 1 and infinity, of 2 and 2.
    assert (first, after_first) == (2.0, [False, -2.0, 0.1])
    assert (second, after_second) == (float("inf"), [True, -2.0, 0.1])
    assert (third, after_third) == (2.0, [False, pytest.approx(-2.2), 0.01])


@pytest.mark.gpu
def test_fp16_trains_on_cuda() -> None:
    rates = run_one(_cuda, "fp16")
    assert rates[0] == "cuda:0"
    assert rates[1] < 0.05


@pytest.mark.gpu
def test_fp16_synchronizes_as_often_as_by_hand() -> None:
    assert run_one(_syncs) == [1, 0, 1]


def _syncs() -> list[float]:
    """Synchronizations of a step: not fused, fused, fused with a scheduler."""
    found: list[float] = []
    for fused, scheduled in ((False, False), (True, False), (True, True)):
        accelerator = Accelerator(mixed_precision="fp16")
        model = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        rows = torch.ones(2, 8, device="cuda")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(8):
                if step == 4:
                    torch.cuda.set_sync_debug_mode("warn")
                accelerator.backward(model(rows).sum())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if scheduled:
                    scheduler.step()
                optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        found.append(sum("called a synchronizing" in str(warning.message) for warning in told) / 4)
    return found


def _cuda(precision: str) -> list[Any]:
    accelerator = Accelerator(mixed_precision=precision)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = TensorDataset(torch.linspace(0, 1, 64)[:, None], torch.linspace(0, 2, 64)[:, None])
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    loss = torch.ones(())
    for _ in range(200):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [str(accelerator.device), loss.item()]


def _signature() -> list[Any]:
    accelerator = Accelerator(mixed_precision="bf16")

    class Named(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return ids

    model = accelerator.prepare(Named())
    with accelerator.autocast(accelerator.autocast_handler):
        inside = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    return [list(inspect.signature(model.forward).parameters), inside]


def test_a_forward_in_mixed_precision_keeps_its_signature() -> None:
    assert run_one(_signature) == [["ids", "mask"], torch.bfloat16]


def _off() -> torch.dtype:

    accelerator = Accelerator(mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_autocast_can_be_turned_off_for_a_region() -> None:
    assert run_one(_off) is torch.float32


def short(x: torch.Tensor) -> dict[str, Any]:
    """What it does."""
    return {"y": x.half(), "z": [x.bfloat16(), x.double()], "n": 1}


def test_outputs_are_widened_and_the_wrapper_pickles() -> None:
    wrapped = pickle.loads(pickle.dumps(convert_outputs_to_fp32(short)))
    assert isinstance(wrapped, ConvertOutputsToFp32)
    assert (vars(wrapped)["__name__"], wrapped.__doc__) == ("short", "What it does.")
    out = wrapped(torch.ones(1))
    assert [out["y"].dtype, out["z"][0].dtype, out["z"][1].dtype, out["n"]] == [
        torch.float32,
        torch.float32,
        torch.float64,
        1,
    ]


def test_a_script_sets_its_own_scaler() -> None:
    assert run_one(_own_scaler) == [8.0, -1.0, None, -2.0]


def _own_scaler() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen: list[Any] = []
    for _ in range(2):
        loss = model(torch.ones(1, 1)).sum()
        accelerator.backward(loss)
        scale = accelerator.scaler and accelerator.scaler.get_scale()
        assert model.weight.grad.item() == (scale or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [scale, model.weight.item()]
        accelerator.scaler = None
    return seen


def test_a_model_that_a_script_takes_out_is_not_saved(tmp_path: Any) -> None:
    assert run_one(_taken_out, tmp_path) == ["model.safetensors"]


def _taken_out(folder: Any) -> list[str]:
    accelerator = Accelerator(cpu=True)
    first, second, third = accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(4, 4))
    accelerator._models = [model for model in accelerator._models if model is not first]
    accelerator._models.remove(second)
    assert accelerator._models == [third]
    accelerator.save_state(folder / "kept")
    return [path.name for path in (folder / "kept").glob("*.safetensors")]
