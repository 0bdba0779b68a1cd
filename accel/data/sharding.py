"""The batch sampler of one process: its own share of the batches of an epoch, at the cost of that share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from accel.data.order import OrderRng, draw
from accel.data.share import Share
from accel.errors import DataError

__all__ = ["Epoch", "ShardedBatchSampler", "Share"]


class Epoch(Iterator[Any]):
    """The batches of this process in one epoch, of which the first ``skip`` are left out.

    One batch of indices is held back, so that the end is known with the last batch and not after it; no sample is
    read ahead for that. The order is drawn at the first batch, or by `begin`.
    """

    def __init__(self, owner: ShardedBatchSampler, skip: int, replay: dict[str, Any] | None) -> None:
        self._owner = owner
        self._given = skip
        self._replay = replay
        self._batches: Iterator[Any] | None = None
        self._ahead: Any = None
        self.order: dict[str, Any] = {}
        self.total: int | None = None
        self.last_counts: tuple[int, ...] | None = None

    def begin(self) -> None:
        """Draw the order, if that has not been done."""
        if self._batches is None:
            with self._owner.rng.drawing(self._replay) as self.order:
                self._batches = self._owner.produce(self, self._given)
                self._advance()

    def _advance(self) -> None:
        assert self._batches is not None
        try:
            self._ahead = next(self._batches)
        except StopIteration:
            self.total = self._given

    def __next__(self) -> Any:
        self.begin()
        if self.total is not None:
            raise StopIteration
        batch = self._ahead
        self._given += 1
        self._advance()
        return batch


class ShardedBatchSampler(Sampler[Any]):
    """Yields the batches of indices of process ``index`` among ``processes``.

    ``source`` is a batch sampler, or any iterable of batches. Where it is torch's own `BatchSampler`, a batch costs
    this process its own indices alone, however many processes there are, if the sampler inside can be indexed or is
    one of torch's; a sampler that can only be walked is walked. Any other source is dealt out in whole batches.
    ``split``: each batch is cut into one part a process (its size must be a multiple of the processes, else
    `DataError`). ``even`` and dropping: see `Share`.
    """

    def __init__(
        self,
        source: Any,
        *,
        processes: int = 1,
        index: int = 0,
        split: bool = False,
        even: bool = True,
        shared: bool = True,
    ) -> None:
        self.source = source
        self.plain = type(source) is BatchSampler
        self.sampler = getattr(source, "sampler", None)
        self.own_share = isinstance(self.sampler, DistributedSampler)
        self.processes = 1 if self.own_share else processes
        self.index = 0 if self.own_share else index
        self.split = split and self.processes > 1
        self.even_batches = even
        self.drop_last = bool(getattr(source, "drop_last", False))
        self.batch_size = self._own_batch_size(getattr(source, "batch_size", None))
        self.rng = OrderRng([self.sampler, source], shared=shared and self.processes > 1)
        self.skip = 0
        self.replay: dict[str, Any] | None = None
        self.epoch = Epoch(self, 0, None)

    def _own_batch_size(self, size: Any) -> int | None:
        if not isinstance(size, int):
            if self.split:
                raise DataError(
                    f"split_batches needs a batch sampler with a batch_size, {type(self.source).__name__} has none"
                )
            return None
        if not self.split:
            return size
        if size % self.processes:
            raise DataError(
                f"split_batches: batch size {size} is not a multiple of the {self.processes} processes; "
                f"nearest are {size - size % self.processes} and {size + self.processes - size % self.processes}"
            )
        return size // self.processes

    def share(self, samples: int) -> Share:
        """The arithmetic of this process's share of ``samples``."""
        return Share(
            samples=samples,
            batch=self.batch_size or 1,
            processes=self.processes,
            index=self.index,
            even=self.even_batches and self.processes > 1,
            drop_last=self.drop_last,
        )

    def __iter__(self) -> Epoch:
        self.epoch = Epoch(self, self.skip, self.replay)
        return self.epoch

    def __len__(self) -> int:
        """Batches of this process in a whole epoch."""
        if self.plain or self.split:
            return self.share(self.samples).steps
        batches = len(self.source)
        whole, rest = divmod(batches, self.processes)
        if rest == 0 or self.drop_last:
            return whole
        return whole + (self.even_batches or rest > self.index)

    @property
    def samples(self) -> int:
        """Samples in an epoch, over all processes. Raises `TypeError` where the sampler does not know."""
        if self.plain:
            return len(cast(Sized, self.sampler))
        return len(self.source) * (self.batch_size or 1) * (self.processes if self.split else 1)

    def last_rows(self) -> int:
        """Samples in the last batch of the epoch begun last, repetitions included, where all processes have as many."""
        if self.own_share:
            return (self.samples - 1) % (self.batch_size or 1) + 1
        return self.batch_size or max(self.epoch.last_counts or (1,))

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers inside which epoch comes next, those that want to know."""
        for part in (self.source, self.sampler):
            listener = getattr(part, "set_epoch", None)
            if listener is not None:
                listener(epoch)

    def produce(self, epoch: Epoch, skip: int) -> Iterator[Any]:
        """Draw an order and yield this process's batches of it from number ``skip`` on."""
        if not self.plain:
            return self._split_each(epoch, skip) if self.split else self._deal(iter(self.source), epoch, skip)
        if isinstance(self.sampler, DistributedSampler):
            epoch.last_counts = _distributed_counts(self.sampler, self.share(len(self.sampler)))
        order = draw(cast(Iterable[Any], self.sampler))
        if isinstance(order, Iterator):
            return self._walk(order, epoch, skip)
        return self._pick(cast(Sequence[int], order), epoch, skip)

    def _pick(self, order: Sequence[int] | torch.Tensor, epoch: Epoch, skip: int) -> Iterator[list[int]]:
        share = self.share(len(order))
        if share.steps and self.processes > 1:
            epoch.last_counts = share.real_counts(share.steps - 1)
        whole = share.samples // share.round_size
        if isinstance(order, torch.Tensor):
            # Own batches side by side: stepping through memory is fast, and the rest of the epoch can be let go.
            rounds = order[: whole * share.round_size].view(whole, share.processes, share.batch)
            own = rounds[:, share.index].contiguous()
            last = [_indices(order, *share.span(step), share.samples) for step in range(whole, share.steps)]
            del order, rounds
            yield from (own[step].tolist() for step in range(skip, whole))
            yield from last[max(0, skip - whole) :]
            return
        for step in range(skip, share.steps):
            yield _indices(order, *share.span(step), share.samples)

    def _walk(self, samples: Iterator[Any], epoch: Epoch, skip: int) -> Iterator[list[Any]]:
        share = self.share(0)
        head: list[Any] = []
        for step in _forever():
            dealt = list(islice(samples, share.round_size))
            head = head or dealt
            if len(dealt) == share.round_size:
                if step >= skip:
                    yield dealt[self.index * share.batch : (self.index + 1) * share.batch]
                continue
            if dealt and not self.drop_last:
                if self.processes > 1:
                    epoch.last_counts = self.share(len(dealt)).real_counts(0)
                if step >= skip:
                    yield from self._last(dealt, head, share)
            elif step > 0 and self.processes > 1:
                epoch.last_counts = (share.batch,) * self.processes
            return

    def _last(self, dealt: list[Any], head: list[Any], share: Share) -> Iterator[list[Any]]:
        if share.even:
            dealt = [*dealt, *islice(cycle(head), share.round_size - len(dealt))]
        batch = dealt[self.index * share.batch : (self.index + 1) * share.batch]
        if batch:
            yield batch

    def _split_each(self, epoch: Epoch, skip: int) -> Iterator[Any]:
        return self._walk(chain.from_iterable(self.source), epoch, skip)

    def _deal(self, batches: Iterator[Any], epoch: Epoch, skip: int) -> Iterator[Any]:
        head: list[Any] = []
        dealt = list(islice(batches, self.processes))
        for step in _forever():
            following = list(islice(batches, self.processes)) if len(dealt) == self.processes else []
            head = head or dealt
            if not following:
                if dealt and step >= skip:
                    yield from self._last_dealt(dealt, head, epoch)
                return
            if step >= skip:
                yield dealt[self.index]
            dealt = following

    def _last_dealt(self, dealt: list[Any], head: list[Any], epoch: Epoch) -> Iterator[Any]:
        complete = len(dealt) == self.processes and self._full(dealt[-1])
        if self.drop_last and not complete:
            return
        if self.processes > 1:
            sizes = [len(batch) if isinstance(batch, Sized) else 1 for batch in dealt]
            epoch.last_counts = (*sizes, *[0] * (self.processes - len(dealt)))
        if self.even_batches and self.processes > 1 and not complete:
            dealt = self._completed(dealt, head)
        if self.index < len(dealt):
            yield dealt[self.index]

    def _full(self, batch: Any) -> bool:
        return self.batch_size is None or (isinstance(batch, Sized) and len(batch) >= self.batch_size)

    def _completed(self, dealt: list[Any], head: list[Any]) -> list[Any]:
        size = self.batch_size
        if size is None or any(len(batch) != size for batch in dealt[:-1]) or len(dealt[-1]) > size:
            return [*dealt, *islice(cycle(head), self.processes - len(dealt))]
        flat = list(chain.from_iterable(dealt))
        flat.extend(islice(cycle(chain.from_iterable(head)), size * self.processes - len(flat)))
        return [flat[start : start + size] for start in range(0, len(flat), size)]


def _forever() -> Iterator[int]:
    return iter(range(2**63))


def _indices(order: Any, start: int, end: int, samples: int) -> list[int]:
    if end > samples:
        return [int(order[position % samples]) for position in range(start, end)]
    if isinstance(order, torch.Tensor):
        listed: list[int] = order[start:end].tolist()
        return listed
    if isinstance(order, (range, list)):
        return list(order[start:end])
    return [order[position] for position in range(start, end)]


def _distributed_counts(sampler: DistributedSampler[Any], share: Share) -> tuple[int, ...] | None:
    # torch's DistributedSampler deals single samples and repeats some at its end; rank r's samples are r, r + P, …
    replicas, size = sampler.num_replicas, len(cast(Sized, sampler.dataset))
    if not share.steps or sampler.drop_last:
        return None
    start = (share.steps - 1) * share.batch
    real = [len(range(rank, size, replicas)) for rank in range(replicas)]
    return tuple(max(0, min(share.batch, count - start)) for count in real)
