"""What the share of one rank costs in worlds of many sizes, and how long it takes to skip to the middle of an epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from accelerate.data_loader import BatchSamplerShard
from accelerate.data_loader import prepare_data_loader as their_prepare
from accelerate.data_loader import skip_first_batches as their_skip
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel.data.batch_sampler import BatchSamplerShard as OurShard
from accel.data.prepare import prepare_data_loader
from benchmarks.scripts.rounds import interleave, write

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "9"))
BATCH = 32
STEPS = 200
SKIPPED = 10_000


def sampler(samples: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(samples)), BATCH, drop_last=False)


class Walk:
    """Batches of this rank past the first, which pays for the permutation of the epoch: `begin` is not measured."""

    def __init__(self, sharded: Any, steps: int) -> None:
        self.sharded = sharded
        self.steps = steps
        self.batches: Any = None

    def begin(self) -> None:
        self.batches = iter(self.sharded)
        next(self.batches)

    def __call__(self) -> int:
        return sum(1 for _ in itertools.islice(self.batches, self.steps))


def main() -> None:
    seconds: dict[str, list[float]] = {}
    loops: dict[str, Callable[[], int]] = {}
    for world, steps in ((1, STEPS), (64, STEPS), (1024, STEPS)):
        samples = BATCH * world * (steps + 2)
        ours = OurShard(sampler(samples), num_processes=world, process_index=world // 2)
        theirs = BatchSamplerShard(sampler(samples), num_processes=world, process_index=world // 2)
        loops[f"world {world}, accel"] = Walk(ours, steps)
        loops[f"world {world}, accelerate"] = Walk(theirs, steps if world < 1024 else 20)
    seconds.update(interleave(loops, ROUNDS))
    seconds.update(interleave(skipping(), max(3, ROUNDS // 2), warm_up=1))
    write(seconds)


def skipping() -> dict[str, Callable[[], int]]:
    """The first batch after 10,000 skipped ones, over the first batch without skipping, at world size 64."""
    data: Any = range(64 * (SKIPPED + 10) * 2)
    ours = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=64, process_index=3)
    theirs = their_prepare(DataLoader(data, batch_size=2), num_processes=64, process_index=3)

    def first(loader: Any) -> Callable[[], int]:
        def measured() -> int:
            next(iter(loader))
            return 1

        return measured

    return {
        "skip 10,000 at world 64, accel": first(ours.skipping(SKIPPED)),
        "skip 10,000 at world 64, accelerate": first(their_skip(theirs, SKIPPED)),
        "skip 0 at world 64, accel": first(ours),
        "skip 0 at world 64, accelerate": first(theirs),
    }


if __name__ == "__main__":
    main()
