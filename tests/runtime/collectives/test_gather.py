"""`gather_for_metrics` gives every sample once: whatever the data, the world and the last round are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accel import Accelerator, DataLoaderConfiguration
from accel.errors import CollectiveError
from accel.pytree import find_batch_size

from ..data.test_loader import OwnBatches, Shuffled, Stream
from ..small import Numbers
from ..worlds import run, run_one


def _gathered(size: int, kind: str, workers: int = 0, split: bool = False) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
    dataset: Any = Stream(size) if kind == "stream" else Numbers(size)
    how: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    if kind == "distributed":
        how["sampler"] = DistributedSampler(dataset, shuffle=False)
    if kind == "batch sampler":
        how = {"batch_sampler": OwnBatches(range(size), 4, False)}
    if kind == "walked":
        how["sampler"] = Shuffled(size)
    loader = accelerator.prepare(DataLoader(dataset, **how))
    seen: list[int] = []
    objects: list[str] = []
    pairs: list[list[int]] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        objects += accelerator.gather_for_metrics([f"item {i}" for i in batch.tolist()])
        twice = torch.stack([batch, batch + 1000], dim=1).reshape(-1)
        doubled = accelerator.gather_for_metrics({"rows": twice})["rows"]
        pairs += doubled.reshape(-1, 2).tolist()
        if len(batch) > 1:  # else a number a process and a number a sample look the same
            assert accelerator.gather_for_metrics(torch.tensor(1.0)).tolist() == [1.0, 1.0]
    return [sorted(seen), sorted(objects), sorted(pairs), find_batch_size(batch)]


@pytest.mark.parametrize("kind", ["map", "stream", "distributed", "batch sampler", "walked"])
def test_gather_for_metrics_drops_exactly_the_repetitions(kind: str) -> None:
    sizes = [3, 8, 13, 16, 17]
    for results in run(_gathered_for, sizes, kind):
        for size, (seen, objects, pairs, _) in zip(sizes, results, strict=True):
            assert seen == list(range(size))
            assert objects == sorted(f"item {i}" for i in range(size))
            assert pairs == [[i, i + 1000] for i in range(size)]


def _gathered_with(remainder: int) -> list[int]:
    accelerator = Accelerator()
    loader: Any = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    for batch in loader:
        if loader.end_of_dataloader:
            loader.remainder = remainder
        last: list[int] = accelerator.gather_for_metrics(batch).tolist()
    return last


@pytest.mark.parametrize(("remainder", "last"), [(3, [4, 0, 1]), (-1, [4, 0, 1, 2])])
def test_a_script_may_set_the_remainder(remainder: int, last: list[int]) -> None:
    assert run(_gathered_with, remainder) == [last] * 2


def _gathered_for(sizes: list[int], kind: str) -> list[Any]:
    return [_gathered(size, kind) for size in sizes]


def test_gather_for_metrics_with_split_batches_and_with_workers() -> None:
    for seen, _, _, rows in run(_gathered, 13, "map", 0, True):
        assert seen == list(range(13))
        assert rows == 2
    for seen, _, _, _ in run(_gathered, 13, "stream", 0, True):
        assert seen == list(range(13))


def _repeated_losses(size: int, dispatch: bool) -> list[int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
    loss = torch.tensor(2.0)
    return [len(accelerator.gather_for_metrics(loss.repeat(4))) for _ in loader]


@pytest.mark.parametrize(("processes", "dispatch"), [(1, False), (2, False), (2, True)])
def test_a_loss_repeated_for_each_sample_of_a_full_batch_counts_once_a_real_sample(
    processes: int, dispatch: bool
) -> None:
    """What transformers' Trainer does to weigh batches, the short last one included."""
    for size in (9, 11, 12, 13):
        for lengths in run(_repeated_losses, size, dispatch, processes=processes):
            assert sum(lengths) == size, (size, lengths)


def _without_even_batches(sizes: list[int], kind: str) -> list[Any]:
    results = []
    for size in sizes:
        config = DataLoaderConfiguration(even_batches=False, dispatch_batches=kind.startswith("dispatched"))
        accelerator = Accelerator(dataloader_config=config)
        how: dict[str, Any] = {"batch_size": 4}
        dataset: Any = Numbers(size)
        if kind == "walked":
            how["sampler"] = Shuffled(size)
        if kind == "batch sampler":
            how = {"batch_sampler": OwnBatches(range(size), 4, False)}
        if kind in ("stream", "dispatched"):
            dataset = Stream(size)
        if kind == "dispatched batches":
            dataset, how = [torch.arange(size)[start : start + 4] for start in range(0, size, 4)], {"batch_size": None}
        gathered: dict[str, list[Any]] = {"rows": [], "pairs": [], "objects": [], "losses": [], "error": []}
        try:
            for batch in accelerator.prepare(DataLoader(dataset, **how)):
                pairs = torch.stack([batch, batch + 1000], dim=1).reshape(-1)
                everyones = accelerator.gather_for_metrics({"rows": batch, "pairs": pairs, "loss": torch.tensor([1.0])})
                assert everyones["loss"].tolist() == [1.0, 1.0]
                gathered["rows"] += everyones["rows"].tolist()
                gathered["pairs"] += everyones["pairs"].tolist()
                gathered["objects"] += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
                if kind != "dispatched batches":
                    gathered["losses"] += accelerator.gather_for_metrics(torch.tensor(2.0).repeat(4)).tolist()
        except CollectiveError as error:
            gathered["error"].append(str(error))
        results.append(gathered)
    return results


@pytest.mark.parametrize("kind", ["map", "walked", "batch sampler", "stream", "dispatched", "dispatched batches"])
def test_a_short_last_round_without_even_batches_is_gathered_whole(kind: str) -> None:
    sizes = [13, 15, 16, 17]
    first, second = run(_without_even_batches, sizes, kind)
    for size, main, other in zip(sizes, first, second, strict=True):
        absent = size == 17
        complete = 16 if absent else size
        assert other["error"] == []
        assert bool(main["error"]) == absent
        for gathered in (main, other):
            rows = sorted(gathered["rows"])
            assert len(rows) == complete
            assert kind == "walked" or rows == list(range(complete))
            assert sorted(gathered["pairs"]) == sorted(rows + [row + 1000 for row in rows])
            assert sorted(gathered["objects"]) == rows
            assert len(gathered["losses"]) == (0 if kind == "dispatched batches" else complete)
    assert first[-1]["error"] == [
        "gather_for_metrics: process 1 has no batch in the last round, because of even_batches=False: "
        "set even_batches=True, or gather after the loop"
    ]


def _worker_stream() -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Stream(13), batch_size=4, num_workers=1, multiprocessing_context="fork"))
    return sorted(chain.from_iterable(accelerator.gather_for_metrics(batch).tolist() for batch in loader))


def test_repetitions_are_known_from_worker_processes() -> None:
    assert run_one(_worker_stream) == list(range(13))


def _dispatched_rows(sizes: list[int], split: bool, workers: int) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split, dispatch_batches=True))
    found = []
    for size in sizes:
        dataset: Any = Shards(size) if workers else Stream(size)
        batch = 2 * accelerator.num_processes if split else 2
        loader = accelerator.prepare(
            DataLoader(
                dataset, batch_size=batch, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
        )
        rows, objects = [], []
        for batch in loader:
            rows += accelerator.gather_for_metrics({"x": [batch]})["x"][0].tolist()
            objects += accelerator.gather_for_metrics([str(item) for item in batch.tolist()])
        found.append([sorted(rows), sorted(objects, key=int)])
    return found


class Shards(IterableDataset[int]):
    """Divided among worker processes, each of which ends with a short batch of its own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter(range(info.id, self.size, info.num_workers))


@pytest.mark.parametrize(("split", "workers"), [(False, 0), (True, 0), (False, 2)])
@pytest.mark.parametrize("processes", [2, 3])
def test_repetitions_of_any_round_are_dropped_when_dispatching(split: bool, workers: int, processes: int) -> None:
    """In the middle of an epoch too: workers that end early give short batches there."""
    sizes = [1, 2, 5, 6, 7, 12, 13, 22]
    for found in run(_dispatched_rows, sizes, split, workers, processes=processes):
        for size, (rows, objects) in zip(sizes, found, strict=True):
            assert rows == list(range(size))
            assert objects == [str(number) for number in range(size)]
