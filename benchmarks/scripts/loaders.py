"""A batch from a prepared loader: over the plain loader in one process, dispatched from the main process in a world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import accel
from benchmarks.scripts.rounds import interleave, over, write

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "15"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ROWS = 4000
BATCHES = 400
WIDTHS = (32, 512, 8192)
WORKERS: dict[str, dict[str, Any]] = {"": {}, ", 2 workers": {"num_workers": 2, "persistent_workers": True}}


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, 8)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, 8)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Batches(IterableDataset[Any]):
    """Batches of three tensors of 16 rows."""

    def __init__(self, width: int) -> None:
        self.batch = {name: torch.ones(16, width, dtype=torch.int64) for name in ("ids", "mask", "labels")}

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(BATCHES))


def walk(loader: Any) -> Callable[[], int]:
    return lambda: sum(1 for _ in loader)


def scatter(width: int) -> Callable[[], int]:
    """A loop that hands each process its batch of a round by `scatter_object_list`."""

    def loop() -> int:
        batches = iter(Batches(width))
        rounds = BATCHES // WORLD
        for _ in range(rounds):
            parts = [next(batches) for _ in range(WORLD)] if dist.get_rank() == 0 else None
            dist.scatter_object_list([None], parts)
        return rounds

    return loop


def main() -> None:
    torch.set_num_threads(1)
    ours, theirs = accel.Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    loops: dict[str, Callable[[], int]] = {}
    if WORLD == 1:
        for (staff, how), kind in product(WORKERS.items(), (Rows, Stream)):
            name = f"{kind.__name__}{staff}"
            loops[f"{name}, plain"] = walk(DataLoader(kind(), batch_size=4, **how))
            loops[f"{name}, accel"] = walk(ours.prepare(DataLoader(kind(), batch_size=4, **how)))
            loops[f"{name}, accelerate"] = walk(theirs.prepare(DataLoader(kind(), batch_size=4, **how)))
    else:
        for width in WIDTHS:
            loops[f"16 × {width}, accel"] = walk(ours.prepare(DataLoader(Batches(width), batch_size=None)))
            loops[f"16 × {width}, scatter_object_list"] = scatter(width)
            loops[f"16 × {width}, accelerate"] = walk(theirs.prepare(DataLoader(Batches(width), batch_size=None)))
    seconds = interleave(loops, ROUNDS, warm_up=1)
    if WORLD == 1:
        for kind in (Rows, Stream):
            for name in ("accel", "accelerate"):
                key = f"{kind.__name__}, {name}"
                seconds[f"{key} over plain"] = over(seconds, key, f"{kind.__name__}, plain")
    write(seconds)
    ours.end_training()


if __name__ == "__main__":
    main()
