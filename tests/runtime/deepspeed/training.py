"""The training loop of the DeepSpeed tests: windows over a data loader, the same batches on any number of processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.errors import AccelError
from accel.plugins import GradientAccumulationPlugin
from accel.plugins.deepspeed import DeepSpeedPlugin
from tests.runtime.sharding.training import LENGTH, WORDS, decoder, loss_of

CLIP = 0.3
BATCHES, ROWS = 10, 8  # rows of all processes together
Run = tuple[list[float], list[float]]


def quiet() -> None:
    """Ignore the warnings of DeepSpeed and of torch about it, which a world of the tests would raise as errors."""
    warnings.simplefilter("ignore")


def loader(accelerator: Any) -> Any:
    """Prepare a loader of the same ten batches for any number of processes; each process has its share of a batch."""
    rows = torch.randint(0, WORDS, (BATCHES * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return accelerator.prepare(DataLoader(rows, batch_size=ROWS // accelerator.num_processes))  # type: ignore[arg-type]


def plugin(stage: int, **more: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(zero_stage=stage, gradient_clipping=CLIP, **more)


def accelerator_of(window: int = 1, **how: Any) -> Any:
    return Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window), **how)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def adagrad_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.02)


def message_of(action: Callable[[], Any]) -> str:
    """Return the message of the `AccelError` that ``action`` raises, or "no error"."""
    try:
        action()
    except AccelError as error:
        return str(error)
    return "no error"


def assert_near(runs: Mapping[str, Run], whole: Mapping[str, Run], tolerance: float = 1e-5) -> None:
    """Assert that losses, within 1e-5, and norms equal the ones in ``whole``, where "2, clipped" is "clipped"."""
    for name, (losses, norms) in runs.items():
        expected_losses, expected_norms = whole[name.partition(", ")[2]]
        assert losses == pytest.approx(expected_losses, abs=1e-5), name
        assert norms == pytest.approx(expected_norms, abs=tolerance), name


def epoch(
    accelerator: Any, model: Any, optimizer: Any, batches: Any, schedule: Any = None, manual: bool = False
) -> Run:
    """The loss of each batch over all processes, and the norm of the gradients of each window.

    ``manual``: windows are made by `no_sync` rather than `accumulate`.
    """
    losses, norms = [], []
    length = accelerator.gradient_accumulation_steps
    for number, rows in enumerate(batches):
        last = (number + 1) % length == 0 or number + 1 == BATCHES
        no_sync = nullcontext() if last else accelerator.no_sync(model)
        with no_sync if manual else accelerator.accumulate(model):
            loss = loss_of(model, rows)
            accelerator.backward(loss)
            if last:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            if last or not manual:
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def trained(
    accelerator: Any,
    *,
    manual: bool = False,
    scheduled: bool = False,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = optimizer_of,
) -> Run:
    """Train a fresh decoder for an epoch; free it afterwards. Schedules advance once a process."""
    batches = loader(accelerator)
    model: Any = decoder(0).float()
    optimizer: Any = make(model)
    world, schedule = accelerator.num_processes, None
    if scheduled:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8 ** (step // world))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    run = epoch(accelerator, model, optimizer, batches, schedule, manual)
    accelerator.free_memory()
    return run
