"""One process's share of a data set that can only be read from its start.

Every process reads the same stream and keeps its own part of each round. Items of an incomplete last round
are wrapped in a `Marked` where the data set is read (maybe in a worker process), so that the loader learns
how many are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from accel.data.batch_sampler import part_of
from accel.data.shard_math import Share


class Marked(NamedTuple):
    """An item, or a batch, of the last round, with ``real`` samples over all processes that are not repetitions."""

    item: Any
    real: int


class IterableDatasetShard(IterableDataset[Any]):
    """One process's share of a data set; the last round is dropped, or completed from the first one.

    ``batch_size``: that of each process, or with ``split_batches`` of all together (a multiple of
        ``num_processes``, otherwise `DataError`).
    ``even_batches``: complete the last round.
    ``marks``: yield the items of an incomplete last round as `Marked`.
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
        self._part = part_of(batch_size, num_processes) if split_batches and batch_size > 1 else batch_size

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
        whole = samples // self._round
        if share.steps == whole:
            return whole * self._part
        start, end = share.span(whole)
        return whole * self._part + end - start

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.dataset)
        mine = slice(self.process_index * self._part, (self.process_index + 1) * self._part)
        head: list[Any] = []
        while len(dealt := list(islice(items, self._round))) == self._round:
            head = head or dealt
            yield from dealt[mine]
        if dealt and not self.drop_last:
            real = len(dealt)
            if self.even_batches:
                dealt.extend(islice(cycle(head or dealt[:]), self._round - real))
            yield from (Marked(item, real) if self.marks else item for item in dealt[mine])


class MarkedCollate:
    """A collate function for `IterableDatasetShard`; a batch with marked items becomes one `Marked`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: Any) -> Any:
        if isinstance(items, Marked):
            return Marked(self.collate(items.item), items.real)
        real = (
            next((item.real for item in items if isinstance(item, Marked)), None) if isinstance(items, list) else None
        )
        if real is None:
            return self.collate(items)
        plain = [item.item if isinstance(item, Marked) else item for item in items]
        return Marked(self.collate(plain), real)
