"""Data that are shared out already are not shared out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from accel import Accelerator, DataLoaderConfiguration
from accel.errors import ArgumentError
from accel.state import PartialState
from tests.marks import long
from tests.needs import missing

from ..worlds import outcomes, run

try:
    import datasets  # noqa: F401 - used in the worlds
except ImportError:
    missing("datasets", "pip install datasets")


class Own(IterableDataset[int]):
    """Every second number, beginning with the rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(PartialState().process_index, 12, 2))


def _already(kind: str, config: dict[str, Any]) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    rank, size = accelerator.process_index, accelerator.num_processes
    numbers = torch.arange(12)
    if kind == "subset":
        plain: Any = DataLoader(Subset(numbers, range(rank, 12, size)), batch_size=2)  # type: ignore[arg-type]
    elif kind == "sampler":
        plain = DataLoader(numbers, batch_size=2, sampler=DistributedSampler(numbers, shuffle=False))  # type: ignore[arg-type]
    elif kind == "stream":
        plain = DataLoader(Own(), batch_size=2)
    else:
        plain = DataLoader(_by_node(rank, size), batch_size=2)
    loader = accelerator.prepare(plain)
    batches = [batch["x"] if isinstance(batch, dict) else batch for batch in loader]
    return [type(loader).__name__, sorted(int(item) for batch in batches for item in batch), str(batches[0].device)]


def _numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for item in range(3):
            yield {"x": shard * 3 + item}


def _by_node(rank: int, size: int) -> Any:
    from datasets import IterableDataset as Stream
    from datasets.distributed import split_dataset_by_node

    whole = Stream.from_generator(_numbers, gen_kwargs={"shards": list(range(4))}).with_format("torch")
    return split_dataset_by_node(whole, rank=rank, world_size=size)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *long(("subset", {"already_sharded": True})),
        ("stream", {"already_sharded": True}),
        ("sampler", {}),
        ("split by node", {}),
        *long(("split by node", {"dispatch_batches": False})),
    ],
)
def test_what_is_shared_out_already_is_left_as_it_is(kind: str, config: dict[str, Any]) -> None:
    """Accelerate gives each process half of its half, and says nothing."""
    (first_kind, first, device), (second_kind, second, _) = run(_already, kind, config)
    assert first_kind == second_kind == "DataLoaderShard"
    assert len(first) == len(second) == 6
    assert sorted(first + second) == list(range(12))
    assert device == "cpu"


def test_dispatching_a_share_is_refused() -> None:
    for outcome in outcomes(_already, "split by node", {"dispatch_batches": True}):
        assert outcome.error == "DataError"
        assert "this loader is one process's share" in outcome.message


def _by_shards(dispatch: bool | None) -> list[Any]:
    from datasets import IterableDataset as Stream

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    whole = Stream.from_generator(_numbers, gen_kwargs={"shards": list(range(4))}).with_format("torch")
    loader = accelerator.prepare(DataLoader(whole, batch_size=2))
    own = [item for batch in loader for item in batch["x"].tolist()]
    return [own, accelerator.gather_for_metrics(torch.tensor(own)).tolist()]


@pytest.mark.parametrize("dispatch", [None, False])
def test_a_stream_in_files_is_shared_out_by_file_or_dispatched(dispatch: bool | None) -> None:
    (first, all_items), (second, _) = run(_by_shards, dispatch)
    assert sorted(first + second) == sorted(all_items) == list(range(12))
    if dispatch is False:
        assert first == [0, 1, 2, 3, 4, 5]  # two of the four files, and no other was opened


@pytest.mark.parametrize("other", ["dispatch_batches", "split_batches"])
def test_settings_that_contradict_each_other_are_named(other: str) -> None:
    message = rf"already_sharded=True, {other}=True\): each process already has its share"
    with pytest.raises(ArgumentError, match=message):
        DataLoaderConfiguration(already_sharded=True, **{other: True})
