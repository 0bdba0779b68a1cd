"""Iterable data sets: the end known in time, and going on in the middle though nothing can be asked for by number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel import Accelerator, DataLoaderConfiguration, set_seed, skip_first_batches
from accel.data import DataLoaderShard, prepare_data_loader
from accel.plugins import GradientAccumulationPlugin
from accel.state import GradientState

from ..worlds import run, run_one


class Shuffled(IterableDataset[int]):
    """Shuffles when it is begun, with the generators that scripts use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        random.shuffle(order)
        for item in order:
            self.read += 1
            yield item


class Seeded(Shuffled):
    """Shuffles with a generator of its own."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class Walked(torch.utils.data.Sampler[int]):
    """A sampler without length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def _loader(processes: int, index: int, stateful: bool, **how: Any) -> DataLoaderShard:
    loader = prepare_data_loader(
        DataLoader(Shuffled(26), batch_size=3, **how), None, processes, index, rng_types=["generator"],
        use_stateful_dataloader=stateful,
    )  # fmt: skip
    assert isinstance(loader, DataLoaderShard)
    return loader


def _windows(steps: int) -> None:
    GradientState(GradientAccumulationPlugin(num_steps=steps))


@pytest.fixture(autouse=True)
def _no_windows() -> Iterator[None]:
    yield
    _windows(1)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_resuming_gives_exactly_the_rest_and_the_same_next_epochs(processes: int, stateful: bool, steps: int) -> None:
    """With numbers that the loop draws, and with batches read ahead for the accumulation window."""
    _windows(steps)

    def training(stop_at: int | None) -> tuple[list[list[int]], Any, Any]:
        random.seed(1)
        torch.manual_seed(1)
        loader, seen = _loader(processes, processes - 1, stateful), []
        for _ in range(3):
            for batch in loader:
                seen.append([*batch.tolist(), int(torch.randint(1000, ())), random.randrange(1000)])
                if len(seen) == stop_at:
                    return seen, loader.state_dict(), (torch.get_rng_state(), random.getstate())
        return seen, None, None

    expected, _, _ = training(None)
    for stop_at in range(1, len(expected)):
        seen, state, (rng, python) = training(stop_at)
        set_seed(77)
        loader = _loader(processes, processes - 1, stateful)
        torch.set_rng_state(rng)
        random.setstate(python)
        loader.load_state_dict(state)
        epoch = loader.iteration
        for number in range(epoch, 3):
            batches: Any = loader
            if number == epoch and not stateful:
                batches = skip_first_batches(loader, loader.position)
            for batch in batches:
                seen.append([*batch.tolist(), int(torch.randint(1000, ())), random.randrange(1000)])
        assert seen == expected, f"stopped at {stop_at}"


@pytest.mark.parametrize(("steps", "ahead"), [(1, 1), (2, 1), (4, 3)])
def test_it_reads_ahead_as_far_as_the_window_and_no_further(steps: int, ahead: int) -> None:
    _windows(steps)
    loader = _loader(1, 0, False)
    dataset: Any = loader.dataset
    for number, _ in enumerate(loader, 1):
        assert dataset.read == min(26, 3 * (number + ahead))
    assert number == 9


@pytest.mark.parametrize("kind", ["stream", "walked"])
def test_the_length_of_the_last_window_is_known_with_its_first_batch(kind: str) -> None:
    _windows(4)
    plain: Any = DataLoader(Shuffled(11), batch_size=2)
    if kind == "walked":
        plain = DataLoader(torch.arange(11), batch_size=2, sampler=Walked(11))  # type: ignore[arg-type]
    loader = prepare_data_loader(plain, None, 1, 0)
    left = [loader.batches_left for _ in loader]
    assert len(left) == 6
    assert left[4:] == [2, 1]
    assert left[0] is None


def _gradients(stream: bool) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    data: Any = Shuffled(6) if stream else torch.arange(6)
    torch.manual_seed(0)
    model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), DataLoader(data, batch_size=1))
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones_like(batch, dtype=torch.float32)[:, None]).mean())
            if accelerator.sync_gradients:
                found.append(next(model.parameters()).grad.item())
                model.zero_grad()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_short_last_window_weighs_as_what_it_is(stream: bool) -> None:
    """Accelerate's defect 6, for data whose length is not known: [1.0, 0.5]."""
    assert run_one(_gradients, stream) == [1.0, 1.0]


def _orders(kind: str) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    set_seed(3, device_specific=True)
    dataset = Seeded(12, accelerator.process_index) if kind == "own generator" else Shuffled(12)
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2, **how))
    return [item for _ in range(2) for batch in loader for item in batch.tolist()]


@pytest.mark.parametrize("kind", ["global generator", "own generator", "workers"])
def test_ranks_that_read_the_same_stream_read_it_in_one_order(kind: str) -> None:
    """Whatever their seeds: else their shares would overlap."""
    first, second = run(_orders, kind)
    for epoch in (slice(0, 6), slice(6, 12)):
        assert sorted(first[epoch] + second[epoch]) == list(range(12))


def _uneven() -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(Shuffled(9), batch_size=2))
    counts = []
    for even in (False, None):
        with accelerator.join_uneven_inputs([model], even_batches=even):
            counts.append(0)
            for batch in loader:
                model(batch[:, None].float()).sum().backward()
                counts[-1] += len(batch)
    return counts


def test_uneven_ends_join_on_a_cpu() -> None:
    """Accelerate's defect 3: it did nothing there, and the run hung."""
    assert run(_uneven) == [[5, 6], [4, 6]]


def test_skipping_a_plain_stream() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    assert [batch.tolist() for batch in skip_first_batches(DataLoader(Numbers(), batch_size=2), 2)] == [[4, 5], [6]]
