"""When a sharded run can be saved: by all of its processes, and where its gradients can be had."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.accelerator import Accelerator as Façade
from accel.checkpoint.manifest import find_damage
from accel.errors import ArgumentError
from accel.exit_codes import REQUEUE
from accel.plugins import GradientAccumulationPlugin
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from tests.runtime.worlds import run

from .training import batch, decoder, loss_of, train


def _prepared(each: bool, replicas: int = 1) -> tuple[Façade, Any, Any]:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(),
        parallelism_config=ParallelismConfig(dp_replicate_size=replicas) if replicas > 1 else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, sync_each_batch=each),
    )
    model = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return accelerator, model, optimizer


def _open_window(folder: str, each: bool) -> tuple[list[float], list[float]]:
    accelerator, model, optimizer = _prepared(each)
    train(accelerator, model, optimizer, steps=6)
    accelerator.save_state(folder)
    expected, _ = train(accelerator, model, optimizer, steps=6, first=6)
    train(accelerator, model, optimizer, steps=1)
    accelerator.load_state(folder)
    return train(accelerator, model, optimizer, steps=6, first=6)[0], expected


def test_an_open_window_goes_on(tmp_path: Path) -> None:
    again, expected = run(_open_window, str(tmp_path / "open"), True)[0]
    assert again == expected


def _refused(folder: str) -> str:
    with pytest.raises(ArgumentError) as caught:
        _open_window(folder, False)
    return str(caught.value)


def test_gradients_that_are_held_back_cannot_be_saved(tmp_path: Path) -> None:
    said = set(run(_refused, str(tmp_path / "open")))
    assert len(said) == 1
    assert "sync_each_batch=True" in said.pop()
    assert not (tmp_path / "open").exists()


def _preempted(folder: str, each: bool, replicas: int) -> tuple[Any, int]:
    """How the run ended, and how many batches it had had: the warning comes after the fifth."""
    accelerator, model, optimizer = _prepared(each, replicas)
    step = 0
    try:
        for step in range(1, 200):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch(step, accelerator)))
                optimizer.step()
                optimizer.zero_grad()
            if step == 5 and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGUSR1)
            accelerator.checkpoint_on_preemption(folder)
    except SystemExit as end:
        return end.code, step
    return None, step


@pytest.mark.parametrize(("each", "replicas"), [(False, 1), (False, 2), (True, 1)])
def test_preemption_waits_for_the_end_of_a_window(each: bool, replicas: int, tmp_path: Path) -> None:
    ended = run(_preempted, str(tmp_path / "kept"), each, replicas, processes=2 * replicas)
    codes, steps = zip(*ended, strict=True)
    assert set(codes) == {REQUEUE}
    assert len(set(steps)) == 1
    assert each or steps[0] % 4 == 0
    assert find_damage(tmp_path / "kept") is None
