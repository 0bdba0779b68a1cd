"""Checks of the processes: world, turns, shares, collectives, flags, random numbers, memory."""

from __future__ import annotations

import random

import torch

from accel.accelerator import Accelerator
from accel.collectives import all_objects, broadcast, concatenate
from accel.collectives.rng import set_seed, synchronize_rng_states
from accel.memory import find_executable_batch_size
from accel.selftest.expect import expect_equal
from accel.state import AcceleratorState, PartialState


def world(accelerator: Accelerator) -> None:
    """Check that all processes are in one world, each with its own rank."""
    size, rank = accelerator.num_processes, accelerator.process_index
    expect_equal("ranks", all_objects(rank), list(range(size)))
    expect_equal("sizes", all_objects(size), [size] * size)
    expect_equal("main processes", sum(all_objects(accelerator.is_main_process)), 1)
    expect_equal("last processes", sum(all_objects(accelerator.is_last_process)), 1)
    expect_equal("states", (PartialState().process_index, AcceleratorState().num_processes), (rank, size))
    expect_equal("kind of world", accelerator.use_distributed, size > 1)


def main_process_order(accelerator: Accelerator) -> None:
    """Check that decorated functions run on the right processes, and that the main process goes first."""
    last = accelerator.num_processes - 1
    calls: list[str] = []
    accelerator.on_main_process(calls.append)("main")
    accelerator.on_last_process(calls.append)("last")
    accelerator.on_process(calls.append, process_index=last)("numbered")
    expected = ["main"] * accelerator.is_main_process + ["last", "numbered"] * accelerator.is_last_process
    expect_equal("decorated functions", calls, expected)
    value = torch.tensor([1.0 + accelerator.process_index], device=accelerator.device)
    with accelerator.main_process_first():
        value = value * 2
    expect_equal("after the main process", accelerator.reduce(value), [sum(2.0 * (r + 1) for r in range(last + 1))])


def shares(accelerator: Accelerator) -> None:
    """Check that each item of the inputs is in one share, and that padded shares have equal length."""
    items = list(range(2 * accelerator.num_processes + 1))
    with accelerator.split_between_processes(items) as own_items:
        expect_equal("all shares", [item for share in all_objects(own_items) for item in share], items)
    with accelerator.split_between_processes({"x": torch.arange(len(items))}, apply_padding=True) as padded:
        expect_equal("lengths", len(set(all_objects(len(padded["x"])))), 1)


def collectives(accelerator: Accelerator) -> None:
    """Check that nested tensors of any type are exchanged, and arrive in the order of the ranks."""
    size, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    nest = {
        "a": torch.tensor([float(rank)], device=device),
        "b": [torch.tensor([rank > 0], device=device), torch.full((1, 2), rank, dtype=torch.bfloat16, device=device)],
        "empty": torch.empty(0, 3, device=device),
    }
    gathered = accelerator.gather(nest)
    expect_equal("gather", gathered["a"], [float(r) for r in range(size)])
    expect_equal("gather of bools", gathered["b"][0], [r > 0 for r in range(size)])
    expect_equal("gather of bfloat16", gathered["b"][1].float(), [[float(r)] * 2 for r in range(size)])
    expect_equal("gather of nothing", list(gathered["empty"].shape), [0, 3])
    total = float(sum(range(1, size + 1)))
    expect_equal("sum", accelerator.reduce(torch.tensor(rank + 1.0, device=device), "sum"), total)
    expect_equal("mean", accelerator.reduce(torch.tensor(rank + 1.0, device=device), "mean"), total / size)
    expect_equal("broadcast", broadcast(torch.tensor([rank + 7.0], device=device)), [7.0])
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    expect_equal("padding", padded, [1.0] * (rank + 1) + [0.0] * (size - 1 - rank))
    expect_equal("concatenation", concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(1)}])["x"], [1.0, 0.0])


def triggers(accelerator: Accelerator) -> None:
    """Check that all processes see a flag set by one of them, once."""
    expect_equal("flags at first", accelerator.check_trigger(), False)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    expect_equal("a raised flag", accelerator.check_trigger(), True)
    expect_equal("a flag that was seen", accelerator.check_trigger(), False)


def random_numbers(accelerator: Accelerator) -> None:
    """Check seeding (equal on all processes, or different on request) and synchronization of random numbers."""
    set_seed(11)
    draws = all_objects((random.random(), torch.rand(2).tolist()))
    expect_equal("numbers of one seed", len({str(draw) for draw in draws}), 1)
    set_seed(11, device_specific=True)
    # Processes that compute one batch together need the same numbers.
    own_seeds = accelerator.strategy.data_place[0]
    expect_equal("numbers of own seeds", len(set(all_objects(torch.rand(1).item()))), own_seeds)
    synchronize_rng_states(["torch"])
    expect_equal("synchronised numbers", len(set(all_objects(torch.rand(1).item()))), 1)


def memory(accelerator: Accelerator) -> None:
    """Check that all processes continue with the same smaller batch size when one runs out of memory."""
    sizes: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 85 and accelerator.is_last_process:
            raise RuntimeError("CUDA out of memory. (raised by the self-test)")
        return batch_size

    expect_equal("batch size found", all_objects(train()), [81] * accelerator.num_processes)
    expect_equal("batch sizes tried", sizes, [100, 90, 81])
