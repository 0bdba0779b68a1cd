"""A save that ends at any byte leaves a checkpoint that loads whole: as it was before, or as it is after."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from tests.marks import long
from tests.runtime.worlds import run, run_one

from .training import decoder, train


def _snapshots(folder: str, states: str, cuts: int) -> tuple[list[dict[str, Any]], int]:
    """Save twice, and keep what the disk holds each time that one of the processes has written so many bytes more.

    Returns the weights of both saves, and how many snapshots this process has made.
    """
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    rank, saved, written, made = accelerator.process_index, [], 0, 0
    cut_at: list[int] = []
    pwrite = os.pwrite

    def cut(file: int, data: memoryview, offset: int) -> int:
        nonlocal written, made
        done = 0
        for place in [place - written for place in cut_at if written <= place < written + len(data)]:
            done += pwrite(file, data[done:place], offset + done)
            _keep(Path(folder), Path(states, f"{rank}.{made}"))
            made += 1
        written += len(data)
        return done + pwrite(file, data[done:], offset + done)

    for number in range(2):
        train(accelerator, model, optimizer, steps=1, first=number)
        saved.append(accelerator.get_state_dict(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", cut)
            accelerator.save_state(f"{folder}/here")
        cut_at = sorted(random.Random(rank).sample(range(written), cuts // 2))  # of the second
        written = 0
    return saved, made


def _keep(folder: Path, copy: Path) -> None:
    """Copy what the disk holds, as far as it can be copied: the other process goes on meanwhile, and renames."""
    while True:
        try:
            shutil.copytree(folder, copy)
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(copy, ignore_errors=True)
        else:
            return


def _loads(states: str, saved: list[dict[str, Any]]) -> list[int]:
    """Which of the saves each snapshot is loaded as; -1: neither."""
    accelerator = Accelerator()
    model: Any = decoder(7)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = []
    for state in sorted(Path(states).iterdir()):
        accelerator.load_state(state / "here")
        now = model.state_dict()
        same = [all(torch.equal(now[name], value) for name, value in weights.items()) for weights in saved]
        found.append(same.index(True) if True in same else -1)
    return found


@pytest.mark.parametrize("cuts", [20, *long(1000)])
def test_a_save_that_ends_at_any_byte_is_as_before_or_as_after(cuts: int, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / "run").mkdir()
    (saved, first), (_, second) = run(_snapshots, str(tmp_path / "run"), str(tmp_path / "states"), cuts)
    assert first + second == cuts
    found = run_one(_loads, str(tmp_path / "states"), saved)
    assert len(found) == cuts
    assert set(found) <= {0, 1}
