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

from accel.data.batch_sampler import batch_size_per_rank
from accel.data.shard_math import Share


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
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _round(self) -> int:
        return self._part * self.num_processes

    def __len__(self) -> int:
        samples = len(self.dataset)
        share = Share(
            samples=samples, batch=self._part, processes=self.num_processes, index=self.process_index,
            even=self.even_batches, drop_last=self.drop_last,
        )  # fmt: skip
        full_rounds = samples // self._round
        if share.steps == full_rounds:
            return full_rounds * self._part
        start, end = share.span(full_rounds)
        return full_rounds * self._part + end - start

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.dataset)
        own_slice = slice(self.process_index * self._part, (self.process_index + 1) * self._part)
        head: list[Any] = []
        while len(round_samples := list(islice(items, self._round))) == self._round:
            head = head or round_samples
            yield from round_samples[own_slice]
        if round_samples and not self.drop_last:
            real = len(round_samples)
            if self.even_batches:
                round_samples.extend(islice(cycle(head or round_samples[:]), self._round - real))
            yield from (LastRoundItem(item, real) if self.marks else item for item in round_samples[own_slice])


class LastRoundCollate:
    """A collate function for `IterableDatasetShard`; a batch with marked items becomes one `LastRoundItem`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Any) -> Any:
        """Collate the items; if any is marked, return a `LastRoundItem`."""
        if isinstance(items, LastRoundItem):
            return LastRoundItem(self.collate(items.item), items.real)
        real = (
            next((item.real for item in items if isinstance(item, LastRoundItem)), None)
            if isinstance(items, list)
            else None
        )
        if real is None:
            return self.collate(items)
        samples = [item.item if isinstance(item, LastRoundItem) else item for item in items]
        return LastRoundItem(self.collate(samples), real)
