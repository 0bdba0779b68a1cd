"""One training step by hand, with accel and with Accelerate, in turns, in one process or in each of a world."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.scripts.rounds import interleave, over, shortest_steps, write

STEPS = int(os.environ.get("BENCHMARK_STEPS", "300"))
LENGTHS = {"1 ms": (1e-3, 100), "10 ms": (1e-2, 30), "100 ms": (0.1, 10)}  # seconds of a step by hand, and steps
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


class Repeated(torch.nn.Module):
    """One layer, applied ``times`` times: a step as long as one likes, whose gradients stay few."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.times = times

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            inputs = torch.tanh(self.layer(inputs))
        return inputs


def times_for(seconds: float) -> int:
    """How often `Repeated` takes its layer for a step of ``seconds``; measured on rank 0."""
    model, inputs = Repeated(20), torch.randn(16, 64)
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        model(inputs).pow(2).mean().backward()
        taken.append(time.perf_counter() - started)
    times = torch.tensor([max(1.0, 20 * seconds / min(taken))])
    torch.distributed.broadcast(times, 0)
    return int(times.item())


def long_steps(seconds: float, steps: int, accelerators: dict[str, Any]) -> dict[str, Loop]:
    """Loops of ``steps`` steps in DDP that take about ``seconds`` each: by hand, and with each of ``accelerators``."""
    times = times_for(seconds)
    batches = torch.randn(steps, 16, 64)

    def made(accelerator: Any) -> Loop:
        torch.manual_seed(0)
        model: torch.nn.Module = Repeated(times)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        if accelerator is None:
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)

        def loop() -> int:
            for inputs in batches:
                loss = model(inputs).pow(2).mean()
                loss.backward() if accelerator is None else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return steps

        return loop

    return {name: made(accelerator) for name, accelerator in {"by hand": None, **accelerators}.items()}


class Block(torch.nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.queries_keys_values, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.norms[0](hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norms[1](hidden))))
        return hidden + added


def gpt_steps(accelerators: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Return a step of a GPT, which takes about 12 ms: by hand, and with each of ``accelerators``."""

    def made(accelerator: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        blocks = [Block(96, 4) for _ in range(3)]
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Embedding(256, 96), *blocks, torch.nn.Linear(96, 256))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        words = torch.randint(0, 256, (4, 65))
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)

        def step() -> None:
            loss: Any = torch.nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward() if accelerator is None else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {f"GPT, {name}": made(accelerator) for name, accelerator in {"by hand": None, **accelerators}.items()}


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
    if WORLD > 1:
        for length, (target, steps) in LENGTHS.items():
            long = long_steps(target, steps, {"accel": ours, "accelerate": theirs})
            loops |= {f"{length}, {name}": loop for name, loop in long.items()}
    seconds = interleave(loops, ROUNDS)
    if WORLD == 1:
        seconds |= shortest_steps(gpt_steps({"accel": ours, "accelerate": theirs}), ROUNDS)
    for kind in ("plain", "accumulate", "whole"):
        for name in ("accel", "accelerate"):
            seconds[f"{kind}, {name} over by hand"] = over(seconds, f"{kind}, {name}", f"{kind}, by hand")
    write(seconds)
    ours.end_training()


if __name__ == "__main__":
    main()
