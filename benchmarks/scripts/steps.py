"""One training step by hand, with accel and with Accelerate, in turns, in one process or in each of a world."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.rounds import interleave, over, write

STEPS = int(os.environ.get("BENCHMARK_STEPS", "300"))
ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "15"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

Loop = Callable[[], int]


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(4 * STEPS * WORLD, 8)), batch_size=4)
    return model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def by_hand(whole: bool) -> Loop:
    model, optimizer, loader, scheduler = parts()
    if WORLD > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
        rank = int(os.environ["RANK"])
        loader = DataLoader(
            torch.utils.data.Subset(loader.dataset, range(rank, 4 * STEPS * WORLD, WORLD)), batch_size=4
        )

    def loop() -> int:
        for (inputs,) in loader:
            loss = model(inputs).pow(2).mean()
            loss.backward()
            if whole:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if whole:
                scheduler.step()
            optimizer.zero_grad()
        return STEPS

    return loop


def prepared(accelerator: Any, whole: bool, accumulate: bool) -> Loop:
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())

    def plain() -> int:
        for (inputs,) in loader:
            loss = model(inputs).pow(2).mean()
            accelerator.backward(loss)
            if whole:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if whole:
                scheduler.step()
            optimizer.zero_grad()
            if whole and WORLD == 1:
                accelerator.gather_for_metrics(loss)
        return STEPS

    def accumulating() -> int:
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                loss = model(inputs).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return STEPS

    return accumulating if accumulate else plain


def main() -> None:
    torch.set_num_threads(1)
    from accelerate import Accelerator as Theirs

    from accel import Accelerator as Ours

    ours, theirs = Ours(cpu=True), Theirs(cpu=True)
    assert ours.num_processes == theirs.num_processes == WORLD
    loops: dict[str, Loop] = {}
    for kind, whole, accumulate in (("plain", False, False), ("accumulate", False, True), ("whole", True, False)):
        loops[f"{kind}, by hand"] = by_hand(whole)
        loops[f"{kind}, accel"] = prepared(ours, whole, accumulate)
        loops[f"{kind}, accelerate"] = prepared(theirs, whole, accumulate)
    seconds = interleave(loops, ROUNDS)
    for kind in ("plain", "accumulate", "whole"):
        for name in ("accel", "accelerate"):
            seconds[f"{kind}, {name} over by hand"] = over(seconds, f"{kind}, {name}", f"{kind}, by hand")
    write(seconds)
    ours.end_training()


if __name__ == "__main__":
    main()
