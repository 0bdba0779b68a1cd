"""The share of one process in a data set that can only be read from its start.

Every process reads the same stream and keeps its own part of each round. Items of an incomplete last round travel in a
`Marked`, from wherever the data set is read (a worker process, maybe) to the loader, which so learns how many are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from accel.data.share import Share


class Marked(NamedTuple):
    """An item, or a batch, of the last round, in which ``real`` samples over all processes are no repetitions."""

    item: Any
    real: int


class IterableShard(IterableDataset[Any]):
    """Yields the items of one process; the last round is dropped, or completed from the first one."""

    def __init__(self, dataset: Any, *, batch: int, processes: int, index: int, drop_last: bool, even: bool) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self.share = Share(samples=0, batch=batch, processes=processes, index=index, even=even)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch comes next, if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.share.round_size)
        if self.drop_last or not rest:
            return whole * self.share.batch
        own = min(max(rest - self.share.index * self.share.batch, 0), self.share.batch)
        return whole * self.share.batch + (self.share.batch if self.share.even else own)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.dataset)
        mine = slice(self.share.index * self.share.batch, (self.share.index + 1) * self.share.batch)
        head: list[Any] = []
        while len(dealt := list(islice(items, self.share.round_size))) == self.share.round_size:
            head = head or dealt
            yield from dealt[mine]
        if dealt and not self.drop_last:
            real = len(dealt)
            if self.share.even:
                dealt.extend(islice(cycle(head or dealt[:]), self.share.round_size - real))
            yield from (Marked(item, real) for item in dealt[mine])


class MarkedCollate:
    """Collates what `IterableShard` yields; a batch with marked items comes out as one `Marked`."""

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
