"""Going on after a stop: to the bit, and after being killed at any point of saving."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, DataLoaderConfiguration, set_seed
from accel.checkpoint.manifest import find_damage
from tests.marks import long

from ..small import fill, simple
from ..worlds import run, run_one


def _train(directory: str, stop_at: int | None, resume: bool, stateful: bool) -> list[list[float]]:
    """Three epochs of a model with dropout, accumulation, clipping and a schedule; may stop, or go on, at any batch."""
    config = DataLoaderConfiguration(use_seedable_sampler=stateful, data_seed=5, use_stateful_dataloader=stateful)
    accelerator = Accelerator(gradient_accumulation_steps=3, dataloader_config=config)
    set_seed(1, device_specific=True)
    data = TensorDataset(torch.linspace(-1, 1, 58).reshape(29, 2), torch.linspace(0, 1, 29)[:, None])
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader: Any = DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        set_seed(99)
        accelerator.load_state(directory)
    losses, count = [], 0
    for epoch in range(loader.iteration, 3):
        batches = loader
        if resume and not stateful and epoch == loader.iteration:
            batches = accelerator.skip_first_batches(loader, loader.position)
            resume = False
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append([loss.item(), scheduler.get_last_lr()[0]])
            count += 1
            if count == stop_at:
                accelerator.save_state(directory)
                return losses
    return losses


@pytest.mark.parametrize("processes", [2, *long(1)])
@pytest.mark.parametrize("stateful", [*long(False), True])
def test_a_resumed_run_repeats_the_other_to_the_bit(tmp_path: Path, processes: int, stateful: bool) -> None:
    """In the middle of an epoch and of a window, with dropout, shuffling and clipping."""
    whole = run(_train, "", None, False, stateful, processes=processes)
    per_epoch = len(whole[0]) // 3
    for stop_at in (1, 4, per_epoch - 1, per_epoch, per_epoch + 2):
        directory = str(tmp_path / f"at-{stop_at}")
        first = run(_train, directory, stop_at, False, stateful, processes=processes)
        rest = run(_train, directory, None, True, stateful, processes=processes)
        for rank in range(processes):
            assert first[rank] + rest[rank] == whole[rank], f"stopped at {stop_at}"


def _killed_at_every_point(directory: str) -> list[Any]:
    """Save over a whole checkpoint in forked children, each killed at a later file system call; load after each."""
    accelerator, model, _, tally = simple()
    place = Path(directory) / "here"
    fill(model, 1.0)
    tally.value = 1.0
    accelerator.save_state(place)
    seen = []
    for deadline in range(1, 200):
        child = os.fork()
        if child == 0:
            _kill_at(deadline)
            fill(model, 2.0)
            tally.value = 2.0
            accelerator.save_state(place)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        fill(model, 0.0)
        accelerator.load_state(place)
        value = model.weight.flatten()[0].item()
        assert tally.value == value
        seen.append(value)
        assert find_damage(place) is None
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        fill(model, 1.0)
        tally.value = 1.0
        accelerator.save_state(place)
    return [seen, sorted(entry.name for entry in Path(directory).iterdir())]


def _kill_at(deadline: int) -> None:
    calls = 0

    def watch(event: str, _: Any) -> None:
        nonlocal calls
        if event in (
            "open",
            "os.rename",
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "shutil.rmtree",
            "os.listdir",
            "os.scandir",
        ):
            calls += 1
            if calls == deadline:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def test_killed_at_any_point_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    """Accelerate's defect 5: a failing save left nothing that could be loaded."""
    seen, left = run_one(_killed_at_every_point, str(tmp_path))
    assert len(seen) > 15
    assert set(seen) == {1.0, 2.0}
    assert seen == sorted(seen)  # once the new one is in its place, it stays
    assert left == ["here"]
