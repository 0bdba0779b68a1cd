"""Which samples are whose: against Accelerate's own batch sampler, and by the properties that make it right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from accel.data import BatchSamplerShard, SeedableRandomSampler, Share
from accel.data.shuffle import draw
from accel.errors import DataError
from accel.world.split import bounds
from tests.needs import package

package("accelerate")
package("hypothesis")

from accelerate.data_loader import BatchSamplerShard as Theirs  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

shapes = st.fixed_dictionaries(
    {
        "samples": st.integers(0, 60),
        "batch": st.integers(1, 7),
        "processes": st.integers(1, 5),
        "even": st.booleans(),
        "drop_last": st.booleans(),
    }
)


class Walked(Sampler[int]):
    """A sampler that can only be walked."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        yield from range(self.samples)

    def __len__(self) -> int:
        return self.samples


class Counted(Sequence[int]):
    """An indexable sampler that counts what is read from it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.reads = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        self.reads += 1
        return index


def shards(sampler: Any, shape: dict[str, Any], *, split: bool = False) -> list[list[list[int]]]:
    size = shape["batch"] * (shape["processes"] if split else 1)
    source = BatchSampler(sampler, size, shape["drop_last"])
    return [
        list(
            BatchSamplerShard(
                source,
                num_processes=shape["processes"],
                process_index=rank,
                split_batches=split,
                even_batches=shape["even"],
            )
        )
        for rank in range(shape["processes"])
    ]


@given(shape=shapes, split=st.booleans())
@settings(deadline=None)
def test_same_batches_as_accelerate(shape: dict[str, Any], split: bool) -> None:
    if shape["processes"] == 1:
        return  # Accelerate does not shard for one process, and neither do we: next test
    size = shape["batch"] * (shape["processes"] if split else 1)
    source = BatchSampler(range(shape["samples"]), size, shape["drop_last"])
    theirs = [
        list(Theirs(source, shape["processes"], rank, split_batches=split, even_batches=shape["even"]))
        for rank in range(shape["processes"])
    ]
    assert shards(SequentialSampler(range(shape["samples"])), shape, split=split) == theirs


@given(shape=shapes)
@settings(deadline=None)
def test_one_process_sees_its_loader_unchanged(shape: dict[str, Any]) -> None:
    shape = {**shape, "processes": 1}
    source = BatchSampler(range(shape["samples"]), shape["batch"], shape["drop_last"])
    assert shards(range(shape["samples"]), shape) == [list(source)]


@given(shape=shapes, split=st.booleans())
@settings(deadline=None)
def test_walking_dealing_and_picking_agree(shape: dict[str, Any], split: bool) -> None:
    picked = shards(range(shape["samples"]), shape, split=split)
    assert shards(Walked(shape["samples"]), shape, split=split) == picked
    size = shape["batch"] * (shape["processes"] if split else 1)

    class Custom(BatchSampler):
        """Another class than torch's: may yield anything, so that its batches are dealt out whole."""

    source = Custom(range(shape["samples"]), size, shape["drop_last"])
    dealt = [
        list(
            BatchSamplerShard(
                source,
                num_processes=shape["processes"],
                process_index=rank,
                split_batches=split,
                even_batches=shape["even"],
            )
        )
        for rank in range(shape["processes"])
    ]
    assert dealt == picked


@given(shape=shapes, skip=st.integers(0, 12), walked=st.booleans())
@settings(deadline=None)
def test_skipping_leaves_out_exactly_the_first(shape: dict[str, Any], skip: int, walked: bool) -> None:
    sampler: Any = Walked(shape["samples"]) if walked else range(shape["samples"])
    for rank in range(shape["processes"]):
        mine = BatchSamplerShard(
            BatchSampler(sampler, shape["batch"], shape["drop_last"]),
            num_processes=shape["processes"], process_index=rank, even_batches=shape["even"],
        )  # fmt: skip
        whole = list(mine)
        assert len(mine) == len(whole)
        mine.skip = skip
        assert list(mine) == whole[skip:]


@given(shape=shapes)
@settings(deadline=None)
def test_every_sample_once_and_repetitions_are_known(shape: dict[str, Any]) -> None:
    processes, batch = shape["processes"], shape["batch"]
    source = BatchSampler(range(shape["samples"]), batch, shape["drop_last"])
    mine = [
        BatchSamplerShard(source, num_processes=processes, process_index=rank, even_batches=shape["even"])
        for rank in range(processes)
    ]
    batches = [list(sampler) for sampler in mine]
    real: list[int] = []
    for sampler, given_batches in zip(mine, batches, strict=True):
        counts = sampler.epoch.last_counts
        if counts is not None and given_batches:
            given_batches[-1] = given_batches[-1][: counts[sampler.process_index]]
        real += chain.from_iterable(given_batches)
    expected = shape["samples"]
    if shape["drop_last"]:
        expected -= expected % (batch * processes)
    if shape["even"] or processes == 1 or shape["drop_last"]:
        assert sorted(real) == list(range(expected))
    else:
        assert sorted(real) == list(range(shape["samples"]))


@given(length=st.integers(0, 40), parts=st.integers(1, 9))
def test_bounds_cover_in_order_with_sizes_that_differ_by_one_at_most(length: int, parts: int) -> None:
    edges = [bounds(length, index, parts) for index in range(parts)]
    assert list(chain.from_iterable(range(*edge) for edge in edges)) == list(range(length))
    sizes = [end - start for start, end in edges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("processes", [1, 8, 64, 1024])
def test_a_process_reads_its_own_share_only(processes: int) -> None:
    sampler = Counted(32 * 1024 * 4)
    mine = BatchSamplerShard(BatchSampler(sampler, 32, False), num_processes=processes, process_index=processes - 1)
    epoch = iter(mine)
    next(epoch)
    next(epoch)
    assert sampler.reads == 2 * 32  # nothing ahead, at every world size


def test_skipping_reads_nothing_of_what_is_skipped() -> None:
    sampler = Counted(10_000 * 8)
    mine = BatchSamplerShard(BatchSampler(sampler, 8, False), num_processes=2, process_index=1)
    mine.skip = 4_000
    next(iter(mine))
    assert sampler.reads == 8


@pytest.mark.parametrize(("size", "wanted"), [(10, None), (10, 4), (10, 25), (10, 20)])
def test_a_drawn_order_is_torchs_own(size: int, wanted: int | None) -> None:
    def order(own: bool) -> tuple[list[int], list[int]]:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(range(size), num_samples=wanted, generator=generator)
        drawn: Any = draw(sampler) if own else sampler
        return [int(i) for i in drawn], torch.randperm(7, generator=generator).tolist()

    assert order(True) == order(False)
    torch.manual_seed(3)
    mine: Any = draw(RandomSampler(range(size)))
    torch.manual_seed(3)
    assert mine.tolist() == list(RandomSampler(range(size)))


def test_seedable_shuffles_depend_on_seed_and_epoch_alone() -> None:
    sampler = SeedableRandomSampler(range(50), data_seed=7)
    first = list(sampler)
    assert sorted(first) == list(range(50))
    second = list(sampler)
    assert second != first
    torch.manual_seed(99)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) == second


def test_variable_batches_are_dealt_whole_and_none_is_lost() -> None:
    batches = [[0], [1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
    even = [list(BatchSamplerShard(batches, num_processes=2, process_index=rank)) for rank in range(2)]
    assert even == [[[0], [4, 5], [10]], [[1, 2, 3], [6, 7, 8, 9], [0]]]
    uneven = [
        list(BatchSamplerShard(batches, num_processes=2, process_index=rank, even_batches=False)) for rank in range(2)
    ]
    assert uneven == [[[0], [4, 5], [10]], [[1, 2, 3], [6, 7, 8, 9]]]


def test_an_infinite_sampler_is_walked_without_end() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(2**62))

    mine = BatchSamplerShard(BatchSampler(Endless(), 2, False), num_processes=2, process_index=1)
    epoch = iter(mine)
    assert [next(epoch) for _ in range(3)] == [[2, 3], [6, 7], [10, 11]]


def test_split_names_batch_size_and_the_nearest_that_fit() -> None:
    with pytest.raises(DataError, match=r"batch size 10 is not a multiple of the 4 processes; nearest are 8 and 12"):
        BatchSamplerShard(BatchSampler(range(9), 10, False), num_processes=4, split_batches=True)


def test_weighted_samplers_are_the_same_everywhere_through_their_generator() -> None:
    def of(rank: int) -> list[list[int]]:
        sampler = WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(1))
        return list(BatchSamplerShard(BatchSampler(sampler, 3, False), num_processes=2, process_index=rank))

    sampler = WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(1))
    dealt = list(chain.from_iterable(zip(of(0), of(1), strict=True)))
    assert list(chain.from_iterable(dealt)) == list(sampler)


@given(shape=shapes, step=st.integers(0, 20))
def test_real_counts_sum_to_the_samples(shape: dict[str, Any], step: int) -> None:
    share = Share(samples=shape["samples"], batch=shape["batch"], processes=shape["processes"])
    steps = -(-shape["samples"] // share.round_size)
    assert sum(sum(share.real_counts(s)) for s in range(steps)) == shape["samples"]
    assert sum(share.real_counts(steps + step)) == 0
