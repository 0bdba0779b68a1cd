"""Finding the batch size that fits, together; giving memory back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from accel.errors import CallError, StateError
from accel.memory import (
    clear_device_cache,
    convert_bytes,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from accel.state import PartialState

from .worlds import outcomes, run

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def _fits(limit: int, tried: list[int], start: int = 100) -> Callable[..., int]:
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int, factor: int = 1) -> int:
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError(OUT)
        return batch_size * factor

    return train


def test_the_batch_size_shrinks_until_it_fits() -> None:
    tried: list[int] = []
    train = _fits(80, tried)
    assert train(factor=2) == 144
    assert tried == [100, 90, 81, 72]
    assert train.__name__ == "train"
    assert train(3) == 216  # a later call begins with what was found
    assert tried[4:] == [72]


def test_a_rule_of_ones_own() -> None:
    sizes = iter([64, 32, 16])

    @find_executable_batch_size(starting_batch_size=128, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 20:
            raise RuntimeError(OUT + " (GPU 0) out of memory.")
        return batch_size

    assert train() == 16


def test_none_fits() -> None:
    with pytest.raises(StateError, match="train ran out of memory at every batch size from 3 down to 1"):
        _fits(0, [], start=3)()


def test_other_errors_pass_at_once() -> None:
    calls = []

    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        find_executable_batch_size(train)()
    assert calls == [128]


def test_a_batch_size_passed_by_hand_is_refused_with_the_right_call() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str, optimizer: str) -> int:
        return batch_size

    with pytest.raises(CallError, match=r"takes its batch size from .*: call train\(model, optimizer\)$"):
        train(64, "model", "optimizer")
    assert train("model", optimizer="optimizer") == 128


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(OUT), True),
        (MemoryError(), True),
        (RuntimeError("XPU out of memory. Tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("one", "two"), False),
        (RuntimeError("shapes"), False),
        (ValueError(OUT), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert should_reduce_batch_size(error) is expected


def test_memory_that_runs_out_for_real() -> None:
    sizes = iter([2**20])

    @find_executable_batch_size(starting_batch_size=2**60, reduce_batch_size_fn=lambda: next(sizes))
    def allocate(batch_size: int) -> int:
        return torch.empty(batch_size, dtype=torch.uint8).numel()

    assert allocate() == 2**20


def test_what_the_failed_attempt_held_is_free_for_the_next() -> None:
    kept: list[weakref.ref[torch.nn.Module]] = []
    alive: list[bool] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> int:
        alive.extend(reference() is not None for reference in kept)
        model = torch.nn.Linear(2, 2)
        kept.append(weakref.ref(model))
        if batch_size > 9:
            raise torch.OutOfMemoryError(OUT)
        return batch_size

    assert train() == 9
    assert alive == [False]


def _one_runs_out() -> tuple[int, list[int]]:
    rank = PartialState().process_index
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > {0: 85, 1: 1000, 2: 95}[rank]:
            raise torch.OutOfMemoryError(OUT)
        total = torch.ones(1)
        if batch_size < 85:
            torch.distributed.all_reduce(total)
        return batch_size

    return train(), tried


def test_processes_shrink_together() -> None:
    """Accelerate shrinks each by itself: one goes on with another batch size, and the next collective hangs."""
    assert run(_one_runs_out, processes=3) == [(81, [100, 90, 81])] * 3


def _while_others_wait() -> None:
    PartialState(timeout=timedelta(seconds=8))

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int) -> None:
        if PartialState().process_index == 1:
            raise torch.OutOfMemoryError(OUT)
        torch.distributed.all_reduce(torch.ones(1))

    train()


def test_who_waited_for_a_process_that_ran_out_is_told() -> None:
    waited, _ = outcomes(_while_others_wait)
    assert waited.error == "StateError"
    assert "process 1 ran out of memory while this one waited for it in a collective" in waited.message
    assert waited.message.endswith("begin with a smaller batch size")


def test_releasing() -> None:
    assert release_memory() == []
    a, b = torch.ones(3), [torch.ones(3)]
    seen = weakref.ref(a)
    a, b = release_memory(a, b)
    assert (a, b) == (None, None)
    assert seen() is None
    clear_device_cache(garbage_collection=True)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KB"), (3 * 2**30, "3.0 GB"), (2**51, "2.0 PB")]
)
def test_sizes_in_words(size: int, text: str) -> None:
    import accelerate.utils

    assert convert_bytes(size) == text == accelerate.utils.convert_bytes(size)
