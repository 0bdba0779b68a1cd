"""One process's share of a data set that can only be read from its start.

Every process reads the same stream and keeps its own part of each round. Items of an incomplete last round
are wrapped in a `LastRoundItem` where the data set is read (maybe in a worker process), so that the loader learns
how many are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from accel.data.batch_sampler import Share, batch_size_per_rank, pass_epoch


class LastRoundItem(NamedTuple):
    """An item or batch of the last round; ``real``: the round's samples that are not repetitions, on all processes."""

    item: Any
    real: int


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of a data set; the last round is dropped, or completed from the first one.

    ``batch_size``: samples per batch of each process, or with ``split_batches`` of all together (a multiple of
        ``num_processes``, otherwise `DataError`).
    ``even_batches``: complete the last round.
    ``marks``: yield the items of an incomplete last round as `LastRoundItem`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        marks: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.marks = marks
        self._part = batch_size_per_rank(batch_size, num_processes) if split_batches and batch_size > 1 else batch_size

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the data set if that has ``set_epoch``."""
        pass_epoch(epoch, self.dataset)

    def __len__(self) -> int:
        share = Share(
            samples=len(self.dataset), batch=self._part, processes=self.num_processes, index=self.process_index,
            even=self.even_batches, drop_last=self.drop_last,
        )  # fmt: skip
        start, end = share.span(share.steps - 1)
        return (share.steps - 1) * self._part + end - start if share.steps else 0

    def __iter__(self) -> Iterator[Any]:
        items, size = iter(self.dataset), self._part * self.num_processes
        own_slice = slice(self.process_index * self._part, (self.process_index + 1) * self._part)
        head: list[Any] = []
        while len(round_samples := list(islice(items, size))) == size:
            head = head or round_samples
            yield from round_samples[own_slice]
        if round_samples and not self.drop_last:
            real = len(round_samples)
            if self.even_batches:
                round_samples.extend(islice(cycle(head or round_samples[:]), size - real))
            yield from (LastRoundItem(item, real) if self.marks else item for item in round_samples[own_slice])


def collate_last_round(collate: Callable[[Any], Any], items: Any) -> Any:
    """Collate the items of an `IterableDatasetShard`; marked ones become one `LastRoundItem`."""
    if isinstance(items, LastRoundItem):
        return LastRoundItem(collate(items.item), items.real)
    if isinstance(items, list) and items and isinstance(items[0], LastRoundItem):
        return LastRoundItem(collate([item.item for item in items]), items[0].real)
    return collate(items)
