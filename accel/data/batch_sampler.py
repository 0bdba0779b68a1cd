"""`BatchSamplerShard`, which computes only one process's batches, and the position of processes among data shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain, count, cycle, islice, product
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from accel.data.shuffle import OrderRng, draw, is_plain
from accel.errors import ArgumentError, DataError

# The samples of a process in an epoch.
#
# An epoch of N samples is distributed in rounds. A round is one batch for each of P processes, b samples each: in
# round s, process r has the samples from (s·P + r)·b on. Accelerate documents this for complete batches in turn
# as well as for split batches; only b differs.


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of process ``index`` of ``processes`` in an epoch of ``samples``, ``batch`` of them at a time.

    ``drop_last`` drops the last round if it is incomplete. Otherwise ``even`` completes it with samples from the
    start of the epoch; without ``even`` the last processes have a short batch in it, or none.
    """

    samples: int
    batch: int
    processes: int = 1
    index: int = 0
    even: bool = True
    drop_last: bool = False

    @property
    def round_size(self) -> int:
        """Samples in one round, over all processes."""
        return self.batch * self.processes

    @property
    def steps(self) -> int:
        """Batches of this process."""
        full_rounds, rest = divmod(self.samples, self.round_size)
        if self.drop_last or rest == 0:
            return full_rounds
        return full_rounds + (self.even or rest > self.index * self.batch)

    def span(self, step: int) -> tuple[int, int]:
        """Return first and past-the-end position of batch ``step``; positions from ``samples`` on wrap around."""
        start = step * self.round_size + self.index * self.batch
        end = start + self.batch
        return (start, end) if self.even else (start, min(end, self.samples))

    def real_counts(self, step: int) -> tuple[int, ...]:
        """Return each process's number of real (not repeated) samples in round ``step``, in rank order."""
        start = step * self.round_size
        return tuple(
            min(self.batch, max(0, self.samples - start - rank * self.batch)) for rank in range(self.processes)
        )


# Indices listed at a time: a call for each batch would cost as much as the listing itself.
_MAX_LISTED = 4096


class Epoch(Iterator[Any]):
    """An iterator over this process's batches in one epoch, without the first ``skip``.

    If the number of batches is not known in advance, ``ahead`` batches of indices are buffered, so that the end
    is known with the last batch; no samples are read ahead. The order is drawn at the first batch, or by `begin`.

    ``total``: the number of batches, including skipped ones, once it is known.
    ``first``: the epoch's first batch, skipped or not, if the owner has ``with_first``.
    """

    def __init__(self, owner: BatchSamplerShard) -> None:
        self._owner = owner
        self._yielded = owner.skip
        self._replay = owner.replay
        self._depth = owner.ahead
        self._buffer: deque[Any] = deque()
        self._batches: Iterator[Any] | None = None
        self.order: dict[str, Any] = {}
        self.first: Any = None
        self.total: int | None = None
        self.last_counts: tuple[int, ...] | None = None

    def begin(self) -> None:
        """Draw the order, unless it is drawn already."""
        if self._batches is None:
            with self._owner.rng.drawing(self._replay) as self.order:
                self._batches = self._owner.produce(self, self._yielded)
                self._fill_buffer()

    def _fill_buffer(self) -> None:
        assert self._batches is not None
        while self.total is None and len(self._buffer) < self._depth:
            try:
                self._buffer.append(next(self._batches))
            except StopIteration:
                self.total = self._yielded + len(self._buffer)

    def run(self) -> Iterator[Any]:
        """Yield the batches, uncounted if none is buffered: a call for each would cost more than the batch."""
        self.begin()
        assert self._batches is not None
        yield from (self if self._buffer else self._batches)

    def __next__(self) -> Any:
        self.begin()
        batch = self._buffer.popleft() if self._buffer else next(self._batches)  # type: ignore[arg-type]
        self._yielded += 1
        self._fill_buffer()
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches yielded, for torchdata's loader."""
        return {"given": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batches that had been yielded at `state_dict`."""
        self._yielded = state["given"]
        self._batches = None
        self._buffer.clear()
        self.total = None


class BatchSamplerShard(BatchSampler):
    """A sampler of the batches of indices of process ``process_index`` among ``num_processes``.

    ``batch_sampler`` may be any iterable of batches. For torch's own `BatchSampler` a batch costs this process
    only its own indices, however many processes there are, if the sampler inside can be indexed or is one of
    torch's; any other sampler is iterated. Batches of any other source are distributed uncut.

    ``split_batches``: cut each batch into one part per process; its size must be a multiple of the processes,
        otherwise `DataError`.
    ``even_batches``: see `Share`, also for dropping.
    ``shared``: draw the order from the main process's generators, with one collective per epoch.
    ``copies``: the number of processes with the same share.
    ``own_share``: the source is this process's share already; so is one whose sampler is torch's
        `DistributedSampler`.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        shared: bool = False,
        copies: int = 1,
        own_share: bool = False,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.own_share = own_share or isinstance(getattr(batch_sampler, "sampler", None), DistributedSampler)
        self.skip = 0
        self.ahead = 1
        self.counted = False  # True if iterators must count their batches: torchdata's loader reads it
        self.with_first = False  # True if `Epoch.first` is needed even if it is skipped
        self.replay: dict[str, Any] | None = None
        self._shared = shared
        self._copies = copies
        self._configure()
        self.epoch = Epoch(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.epoch = Epoch(self)

    def _configure(self) -> None:
        source = self.batch_sampler
        self._processes = 1 if self.own_share else self.num_processes
        self._index = 0 if self.own_share else self.process_index
        self._plain = is_plain(source, BatchSampler)
        self._split = self.split_batches and self._processes > 1
        self.sampler: Any = getattr(source, "sampler", None)
        self.batch_size: Any = getattr(source, "batch_size", None)
        self.drop_last = bool(getattr(source, "drop_last", False))
        self.own_batch_size = self.batch_size if isinstance(self.batch_size, int) else None
        if self._split:
            if self.own_batch_size is None:
                kind = type(source).__name__
                raise DataError(f"split_batches needs a batch sampler with a batch_size, but {kind} has none")
            self.own_batch_size = batch_size_per_rank(self.own_batch_size, self._processes)
        several = not self.own_share and self.num_processes * self._copies > 1
        self.rng = OrderRng([self.sampler, source], shared=self._shared and several)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler inside, from the next epoch on."""
        self.batch_sampler.sampler = sampler
        self._configure()

    def share(self, samples: int) -> Share:
        """Return the arithmetic of this process's share of ``samples``."""
        return Share(
            samples=samples,
            batch=self.own_batch_size or 1,
            processes=self._processes,
            index=self._index,
            even=self.even_batches and self._processes > 1,
            drop_last=self.drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        self.epoch = Epoch(self)
        return self.epoch if self.counted else self.epoch.run()

    def __len__(self) -> int:
        """Return the number of this process's batches in a full epoch."""
        if self._plain or self._split:
            return self.share(self.samples).steps
        return replace(self.share(len(self.batch_sampler)), batch=1).steps

    @property
    def total_length(self) -> int:
        """Batches of the source, over all processes."""
        return len(self.batch_sampler)

    @property
    def samples(self) -> int:
        """Samples in an epoch, over all processes. Raises `TypeError` for a sampler without length."""
        if self._plain:
            return len(cast(Sized, self.sampler))
        return len(self.batch_sampler) * (self.own_batch_size or 1) * (self._processes if self._split else 1)

    def last_rows(self) -> int:
        """Return the size of the latest epoch's last batch, including repetitions, if equal on all processes."""
        if self.own_share:
            return (self.samples - 1) % (self.own_batch_size or 1) + 1
        if self._processes == 1 and self.epoch.last_counts:
            return self.epoch.last_counts[0]
        return self.own_batch_size or max(self.epoch.last_counts or (1,))

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the samplers inside that have ``set_epoch``."""
        pass_epoch(epoch, self.batch_sampler, self.sampler)

    def produce(self, epoch: Epoch, skip: int) -> Iterator[Any]:
        """Draw an order and yield this process's batches of it from number ``skip`` on."""
        source = self.batch_sampler
        if not self._plain:
            return self._deal(self._cut(chain.from_iterable(source)) if self._split else iter(source), epoch, skip)
        if isinstance(self.sampler, DistributedSampler):
            epoch.last_counts = _distributed_counts(self.sampler, self.share(len(self.sampler)))
        order = draw(self.sampler, epoch.order.get("seed"))
        if isinstance(order, Iterator):
            return self._deal(self._cut(order), epoch, skip)
        share = self.share(len(order))
        epoch.total = max(share.steps, skip)
        if share.steps and not self.own_share:
            epoch.last_counts = share.real_counts(share.steps - 1)
        if self.with_first and share.steps:
            epoch.first = _indices(order, *share.span(0), share.samples)
        return _pick(cast(Sequence[int], order), share, skip)

    def _cut(self, samples: Iterator[Any]) -> Iterator[list[Any]]:
        return iter(lambda: list(islice(samples, self.own_batch_size)), [])

    def _deal(self, batches: Iterator[Any], epoch: Epoch, skip: int) -> Iterator[Any]:
        processes = self._processes
        head: list[Any] = []
        round_batches = list(islice(batches, processes))
        for step in count():
            next_batches = list(islice(batches, processes)) if len(round_batches) == processes else []
            head = head or round_batches
            epoch.first = next(iter(head), None)
            if not next_batches:
                if round_batches and step >= skip:
                    yield from self._last_dealt(round_batches, head, epoch)
                return
            if step >= skip:
                yield round_batches[self._index]
            round_batches = next_batches

    def _last_dealt(self, round_batches: list[Any], head: list[Any], epoch: Epoch) -> Iterator[Any]:
        complete = len(round_batches) == self._processes and self._full(round_batches[-1])
        if self.drop_last and not complete:
            return
        if not self.own_share and (self.even_batches or self._index < len(round_batches)):
            sizes = [len(batch) if isinstance(batch, Sized) else 1 for batch in round_batches]
            epoch.last_counts = (*sizes, *[0] * (self._processes - len(round_batches)))
        if self.even_batches and self._processes > 1 and not complete:
            round_batches = self._completed(round_batches, head)
        if self._index < len(round_batches):
            yield round_batches[self._index]

    def _full(self, batch: Any) -> bool:
        return self.own_batch_size is None or (isinstance(batch, Sized) and len(batch) >= self.own_batch_size)

    def _completed(self, round_batches: list[Any], head: list[Any]) -> list[Any]:
        size, processes = self.own_batch_size, self._processes
        if size is None or any(len(batch) != size for batch in round_batches[:-1]) or len(round_batches[-1]) > size:
            return [*round_batches, *islice(cycle(head), processes - len(round_batches))]
        flat = list(chain.from_iterable(round_batches))
        flat.extend(islice(cycle(chain.from_iterable(head)), size * processes - len(flat)))
        return [flat[start : start + size] for start in range(0, len(flat), size)]


class SkipBatchSampler(BatchSamplerShard):
    """The batches of ``batch_sampler`` without the first ``skip_batches``, which are not computed if possible."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        if skip_batches < 0:
            raise ArgumentError(f"SkipBatchSampler: skip_batches must be 0 or more, got {skip_batches}")
        super().__init__(batch_sampler)
        self.skip = self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.batch_sampler, BatchSamplerShard):
            return islice(iter(self.batch_sampler), self.skip_batches, None)
        return super().__iter__()

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


def pass_epoch(epoch: int, *parts: Any) -> None:
    """Pass ``epoch`` to each of ``parts`` that has ``set_epoch``."""
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def batch_size_per_rank(size: int, processes: int) -> int:
    """Return one process's part of a batch of ``size``. Raises `DataError` if it is not divisible."""
    part, rest = divmod(size, processes)
    if rest:
        lower = f"{size - rest} and " if part else ""
        raise DataError(
            f"split_batches: batch size {size} is not a multiple of the {processes} processes; "
            f"nearest {'are' if lower else 'is'} {lower}{size + processes - rest}"
        )
    return part


def _pick(order: Sequence[int] | torch.Tensor, share: Share, skip: int) -> Iterator[list[int]]:
    full_rounds = share.samples // share.round_size
    if not isinstance(order, torch.Tensor):
        first, batch, stride = share.index * share.batch, share.batch, share.round_size
        for start in range(skip * stride + first, full_rounds * stride, stride):
            yield _indices(order, start, start + batch, share.samples)
        for step in range(max(skip, full_rounds), share.steps):
            yield _indices(order, *share.span(step), share.samples)
        return
    # Own batches in one piece of memory: they are read fast, and the rest of the epoch is freed.
    rounds = order[: full_rounds * share.round_size].view(full_rounds, share.processes, share.batch)
    own_batches = rounds[:, share.index].contiguous()
    last = [_indices(order, *share.span(step), share.samples) for step in range(full_rounds, share.steps)]
    del order, rounds
    chunk = max(1, _MAX_LISTED // share.batch)
    for start in range(skip, full_rounds, chunk):
        yield from own_batches[start : start + chunk].tolist()
    yield from last[max(0, skip - full_rounds) :]


def _indices(order: Any, start: int, end: int, samples: int) -> list[int]:
    if type(order) in (range, list) and end <= samples:
        return list(order[start:end])
    if end > samples:
        return [int(order[position % samples]) for position in range(start, end)]
    if isinstance(order, torch.Tensor):
        indices: list[int] = order[start:end].tolist()
        return indices
    return [order[position] for position in range(start, end)]


def _distributed_counts(sampler: DistributedSampler[Any], share: Share) -> tuple[int, ...] | None:
    # torch's DistributedSampler distributes single samples (rank r has r, r + P, …) and repeats some at its end.
    replicas, size = sampler.num_replicas, len(cast(Sized, sampler.dataset))
    if not share.steps or sampler.drop_last:
        return None
    start = (share.steps - 1) * share.batch
    real = [len(range(rank, size, replicas)) for rank in range(replicas)]
    return tuple(max(0, min(share.batch, count - start)) for count in real)


# Data shares on a device mesh, and loaders that are already sharded.

# Mesh dimensions along which processes see different data; along all others they see the same.
_DATA_DIMENSIONS = ("dp", "fsdp", "dp_replicate", "dp_shard")


def shares_by_rank(mesh: Any, processes: int) -> list[int]:
    """Return the index of each rank's data share: the rank itself, or by its position in ``mesh``."""
    if mesh is None:
        return list(range(processes))
    shares = [0] * processes
    sizes, names = mesh.mesh.shape, mesh.mesh_dim_names or ()
    for coordinates in product(*map(range, sizes)):
        index = 0
        for name, size, coordinate in zip(names, sizes, coordinates, strict=False):
            index = index * size + coordinate if name in _DATA_DIMENSIONS else index
        shares[int(mesh.mesh[coordinates])] = index
    return shares


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler inside ``dataloader``, prepared or not; ``None`` if its batch sampler has none."""
    batch_sampler = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def is_presharded(dataloader: Any) -> bool:
    """Return True if ``dataloader`` is this process's own share already.

    Detects torch's `DistributedSampler`, and a stream of the ``datasets`` library after its
    ``split_dataset_by_node``. Anything else needs ``already_sharded=True``.
    """
    if isinstance(get_sampler(dataloader), DistributedSampler):
        return True
    return is_datasets_stream(dataloader.dataset) and getattr(dataloader.dataset, "_distributed", None) is not None


def is_datasets_stream(dataset: Any) -> bool:
    """Return True for an ``IterableDataset`` of the ``datasets`` library, which can shard itself by file."""
    kinds = type(dataset).__mro__
    return any(kind.__module__ == "datasets.iterable_dataset" and kind.__name__ == "IterableDataset" for kind in kinds)
