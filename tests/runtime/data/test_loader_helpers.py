"""The classes that scripts and libraries build themselves, against Accelerate's own of the same name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accel import data as ours
from accel.errors import ArgumentError, DataError
from accel.state import GradientState, PartialState
from tests.needs import package

package("accelerate")
package("hypothesis")

from accelerate import data_loader as theirs  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

shapes = st.fixed_dictionaries(
    {
        "samples": st.integers(0, 60),
        "batch": st.integers(1, 6),
        "processes": st.integers(1, 5),
        "split": st.booleans(),
        "drop_last": st.booleans(),
    }
)


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.fixture(autouse=True, scope="module")
def _their_state() -> None:
    import accelerate

    PartialState()
    accelerate.PartialState(cpu=True)


@given(shape=shapes, even=st.booleans(), shuffled=st.booleans())
@settings(deadline=None)
def test_batch_sampler_shard(shape: dict[str, Any], even: bool, shuffled: bool) -> None:
    def of(module: Any, rank: int) -> Any:
        numbers = range(shape["samples"])
        generator = torch.Generator().manual_seed(5)
        sampler: Any = RandomSampler(numbers, generator=generator) if shuffled else SequentialSampler(numbers)
        size = shape["batch"] * (shape["processes"] if shape["split"] else 1)
        source = BatchSampler(sampler, size, shape["drop_last"])
        return module.BatchSamplerShard(source, shape["processes"], rank, shape["split"], even)

    if shape["samples"] == 0 and shuffled:
        return  # torch refuses to shuffle nothing
    for rank in range(shape["processes"]):
        mine, other = of(ours, rank), of(theirs, rank)
        if shape["processes"] == 1:
            assert list(mine) == list(mine.batch_sampler) if not shuffled else True
            continue
        assert mine.total_length == other.total_length
        assert (mine.batch_size, mine.drop_last) == (other.batch_size, other.drop_last)
        batches = list(mine)
        assert batches == list(other)
        assert len(mine) == len(batches)


@given(shape=shapes)
@settings(deadline=None)
def test_iterable_dataset_shard(shape: dict[str, Any]) -> None:
    size = shape["batch"] * (shape["processes"] if shape["split"] else 1)
    for rank in range(shape["processes"]):
        asked = (Stream(shape["samples"]), size, shape["drop_last"], shape["processes"], rank, shape["split"])
        mine, other = ours.IterableDatasetShard(*asked), theirs.IterableDatasetShard(*asked)
        items = list(mine)
        assert items == list(other)
        assert len(mine) == len(items)  # theirs counts too many with split_batches


@given(samples=st.integers(0, 30), batch=st.integers(1, 5), skip=st.integers(0, 9), drop_last=st.booleans())
@settings(deadline=None)
def test_skip_batch_sampler(samples: int, batch: int, skip: int, drop_last: bool) -> None:
    source = BatchSampler(SequentialSampler(range(samples)), batch, drop_last)
    mine, other = ours.SkipBatchSampler(source, skip), theirs.SkipBatchSampler(source, skip)
    assert list(mine) == list(iter(other))
    assert mine.total_length == other.total_length
    assert len(mine) == max(0, mine.total_length - skip)  # theirs falls below zero
    shard = ours.BatchSamplerShard(source, 2, 1)
    assert list(ours.SkipBatchSampler(shard, skip)) == list(shard)[skip:]


def test_skip_batch_sampler_does_not_count_backwards() -> None:
    with pytest.raises(ArgumentError, match="must be 0 or more, got -2"):
        ours.SkipBatchSampler(BatchSampler(range(4), 2, False), -2)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("wanted", [None, 7, 23])
def test_seedable_random_sampler(replacement: bool, wanted: int | None) -> None:
    def epochs(kind: Any) -> list[list[int]]:
        sampler = kind(range(10), replacement, wanted, torch.Generator(), data_seed=11)
        found = [list(sampler), list(sampler)]
        sampler.set_epoch(0)
        return [*found, list(sampler)]

    mine = epochs(ours.SeedableRandomSampler)
    assert mine == epochs(theirs.SeedableRandomSampler)
    assert mine[0] == mine[2] != mine[1]


def test_seedable_random_sampler_takes_the_global_seed() -> None:
    torch.manual_seed(31)
    assert list(ours.SeedableRandomSampler(range(9))) == list(ours.SeedableRandomSampler(range(9), data_seed=31))


def test_the_same_epochs_as_accelerate_with_a_seedable_sampler() -> None:
    def epochs(prepare: Any) -> list[list[int]]:
        torch.manual_seed(6)
        plain: Any = DataLoader(torch.arange(11), batch_size=3, shuffle=True)  # type: ignore[arg-type]
        loader = prepare(plain, None, 2, 1, use_seedable_sampler=True, data_seed=8)
        return [batch.tolist() for _ in range(3) for batch in loader]

    assert epochs(ours.prepare_data_loader) == epochs(theirs.prepare_data_loader)


@pytest.mark.parametrize("stream", [False, True])
def test_a_shard_made_by_hand(stream: bool) -> None:
    def of(module: Any) -> Any:
        dataset: Any = Stream(11) if stream else torch.arange(11)
        return module.DataLoaderShard(dataset, skip_batches=1, iteration=3, batch_size=2, drop_last=True)

    mine, other = of(ours), of(theirs)
    assert [batch.tolist() for batch in mine] == [batch.tolist() for batch in other]
    assert mine.iteration == other.iteration == 4
    assert isinstance(mine, DataLoader)


def test_a_shard_made_by_hand_around_a_shard_of_batches() -> None:
    sampler = ours.BatchSamplerShard(BatchSampler(SequentialSampler(range(10)), 2, False), 2, 1)
    loader = ours.DataLoaderShard(torch.arange(10), batch_sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7], [0, 1]]
    assert loader.total_batch_size == 4
    assert loader.real_counts() == (2, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_skip_data_loader(stream: bool) -> None:
    dataset: Any = Stream(7) if stream else torch.arange(7)
    mine = ours.SkipDataLoader(dataset, skip_batches=2, batch_size=2)
    other = theirs.SkipDataLoader(dataset, skip_batches=2, batch_size=2)
    assert [batch.tolist() for batch in mine] == [batch.tolist() for batch in other] == [[4, 5], [6]]
    assert len(mine) == len(other) == 2
    assert not GradientState().in_dataloader


def test_get_and_set_sampler() -> None:
    numbers: Any = torch.arange(6)
    plain = DataLoader(numbers, batch_size=2)
    assert ours.get_sampler(plain) is plain.sampler
    loader = ours.prepare_data_loader(plain, None, 2, 0)
    loader.set_sampler(SequentialSampler(range(4)))
    assert isinstance(loader.get_sampler(), SequentialSampler)
    assert [batch.tolist() for batch in loader] == [[0, 1]]
    with pytest.raises(ArgumentError, match="it is read in its own order"):
        ours.prepare_data_loader(DataLoader(Stream(3))).set_sampler(None)


def test_being_active_by_hand() -> None:
    loader = ours.DataLoaderAdapter(torch.arange(4))
    loader.begin()
    assert GradientState().active_dataloader is loader
    loader.end()
    assert not GradientState().in_dataloader


def test_split_must_come_out_even() -> None:
    with pytest.raises(DataError, match=r"batch size 3 is not a multiple of the 2 processes; nearest are 2 and 4"):
        ours.IterableDatasetShard(Stream(3), 3, False, 2, 0, True)
    with pytest.raises(DataError, match=r"nearest is 4"):
        ours.BatchSamplerShard(BatchSampler(range(9), 2, False), 4, 0, True)


def test_batches_of_no_fixed_size_are_dealt_whole() -> None:
    class Mixed(BatchSampler):
        """Sizes as they come, and no `batch_size`."""

        def __init__(self) -> None:
            self.drop_last = False

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0], [1, 2], [3, 4, 5], [6], [7, 8]])

        def __len__(self) -> int:
            return 5

    for even in (True, False):
        for rank in range(2):
            mine = ours.BatchSamplerShard(Mixed(), 2, rank, even_batches=even)
            other = theirs.BatchSamplerShard(Mixed(), 2, rank, even_batches=even)
            assert list(mine) == list(other)
