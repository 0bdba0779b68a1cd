"""A loader whose data only the main process reads. It sends the data in rounds, a part to each process.

Parts are sent point to point as packed bytes (`accel.data.transfer`): a broadcast would send every part to
every process, and a scatter requires parts of one size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from accel.data.batch_sampler import BatchSamplerShard, batch_size_per_rank, shares_by_rank
from accel.data.loader import PreparedLoader
from accel.data.rows import count_rows, join_rows, take_rows
from accel.data.torch_loader import Lookahead, make_loader, preserve_rng, set_attributes, window_depth
from accel.data.transfer import Encoder, Receiver, Sender, host_group
from accel.errors import DataError
from accel.state import PartialState

# Rounds, into which the main process groups the batches that it reads.
#
# A round is one batch for each share or, for split batches, one batch cut into as many parts. With ``even``,
# the parts of a round are equally long if rows can be moved between batches: the last part is completed with
# rows from the start of the epoch.


@dataclass(frozen=True)
class Round:
    """A round of batches, one for each share.

    ``parts``: the batch of each share, or ``None``.
    ``counts``: the rows of each part that are not repetitions; ``None`` if there are no repetitions and all parts
        have the nominal rows.
    """

    parts: list[Any]
    counts: tuple[int, ...] | None = None


@dataclass(kw_only=True)
class BatchSplitter:
    """A splitter of batches into rounds of ``shares`` parts.

    ``nominal``: rows of a part, if the loader defines them.
    ``slice_fn``: ``slice_fn(batch, rows, process_index=…, num_processes=…)`` cuts a part out of a batch of all
        shares.
    ``first``: the epoch's first batch, whose rows complete the last round; by default copied from the first
        round.
    """

    shares: int
    split: bool
    even: bool
    drop_last: bool
    nominal: int | None = None
    slice_fn: Callable[..., Any] | None = None
    first: Any = None

    def rounds(self, batches: Iterator[Any], skip: int = 0) -> Iterator[Round]:
        """Yield the rounds of ``batches`` after the first ``skip``."""
        round_size = 1 if self.split else self.shares
        for number in count():
            round_batches = list(islice(batches, round_size))
            if not round_batches or (len(round_batches) < round_size and self.drop_last):
                return
            if self.first is None and self.even and self.shares > 1:
                self.first = self._copy_for_completion(round_batches[0])
            if number >= skip:
                yield self._round(round_batches)

    def _copy_for_completion(self, batch: Any) -> Any:
        """Copy the rows of ``batch`` that a short last round needs: the training loop may change its part in place."""
        always_cut = self.split or self.slice_fn is not None
        return copy.deepcopy(take_rows(batch, slice(0, self.shares - 1)) if always_cut else batch)

    def _round(self, round_batches: list[Any]) -> Round:
        sizes = [count_rows(batch) for batch in round_batches]
        equal_sizes = len(round_batches) == self.shares and all(size == sizes[0] for size in sizes)
        whole_batches = not self.split and self.slice_fn is None
        if whole_batches and (equal_sizes or (not self.even and len(round_batches) == self.shares)):
            return Round(round_batches, self._counted(sizes))
        try:
            return self._split(join_rows(round_batches))
        except DataError:
            if not whole_batches:
                raise
        return self._filled(round_batches, sizes)

    def _split(self, joined: Any) -> Round:
        rows = count_rows(joined)
        if rows is None:
            raise DataError(f"a batch of type {type(joined).__name__} has no rows to divide among the processes")
        share_rows, rest = divmod(rows, self.shares)
        if rest and self.even:
            joined = self._completed(joined, self.shares - rest)
            share_rows += 1
            edges = [share * share_rows for share in range(self.shares + 1)]
            counts = tuple(min(share_rows, max(0, rows - start)) for start in edges[:-1])
            return Round([self._slice(joined, edges, share) for share in range(self.shares)], counts)
        edges = [share * share_rows + min(share, rest) for share in range(self.shares + 1)]
        parts = [
            self._slice(joined, edges, share) if edges[share] < edges[share + 1] else None
            for share in range(self.shares)
        ]
        return Round(parts, self._counted([edges[share + 1] - edges[share] for share in range(self.shares)]))

    def _counted(self, sizes: list[int | None]) -> tuple[int, ...] | None:
        if self.nominal is None or all(size == self.nominal or size is None for size in sizes):
            return None
        return tuple(size or 0 for size in sizes)

    def _completed(self, joined: Any, missing: int) -> Any:
        parts = [joined]
        size = count_rows(self.first) or 0
        if size == 0:
            raise DataError("the epoch's first batch has no rows with which to complete the last round")
        while missing > 0:
            parts.append(take_rows(self.first, slice(0, missing)))
            missing -= min(size, missing)
        return join_rows(parts)

    def _slice(self, joined: Any, edges: list[int], share: int) -> Any:
        slicer = take_rows if self.slice_fn is None else self.slice_fn
        return slicer(joined, slice(edges[share], edges[share + 1]), process_index=share, num_processes=self.shares)

    def _filled(self, round_batches: list[Any], sizes: list[int | None]) -> Round:
        """Return a round of batches that cannot be cut; shares without one get the epoch's first batch."""
        missing = self.shares - len(round_batches)
        if not self.even or missing == 0:
            return Round([*round_batches, *[None] * missing])
        return Round([*round_batches, *[self.first] * missing], (*[size or 1 for size in sizes], *[0] * missing))


# The loader.


@dataclass(frozen=True)
class Failure:
    """An error that stopped the main process from reading."""

    error: Exception

    def __str__(self) -> str:
        return f"process 0, which reads the data for all, failed: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Outgoing:
    """A round ready to send: the main process's own part, and the other ranks' messages."""

    local_batch: Any
    counts: tuple[int, ...] | None
    messages: list[torch.Tensor | None]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each rank's message."""
        return [0 if message is None else len(message) for message in self.messages]


class DataLoaderDispatcher(PreparedLoader):
    """A loader that reads batches on the main process and sends each process its part.

    Without ``split_batches`` a round is one batch for each process, with it one batch cut into parts. The last
    round is distributed over all processes; `real_counts` counts its rows that are not repetitions. Batches may
    be of any size and hold anything picklable; if one must be cut, its tensors and lists of one object per row
    are. ``slice_fn`` is called on the main process, for each part. An error of the main process while reading is
    raised there, and on all others as `DataError` with its text. The main process reads one round ahead, or with
    gradient accumulation as many as make a window.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        base, batches = make_loader(dataset, use_stateful_dataloader, kwargs)
        self._set_up(base, batches, device=PartialState().device, non_blocking=_non_blocking, drop_last=_drop_last)
        self._set_up_dispatch(split_batches, True, slice_fn, torch_device_mesh)
        self.skip_batches = skip_batches
        self.iteration = iteration

    @classmethod
    def wrap(
        cls,
        base: DataLoader[Any],
        batches: BatchSamplerShard | None,
        *,
        split: bool,
        even: bool,
        slice_fn: Callable[..., Any] | None,
        mesh: Any,
        **kwargs: Any,
    ) -> DataLoaderDispatcher:
        """Return a loader around ``base`` itself; ``kwargs``: see `PreparedLoader._set_up`."""
        loader = cls.__new__(cls)
        loader._set_up(base, batches, **kwargs)
        loader._set_up_dispatch(split, even, slice_fn, mesh)
        return loader

    def _set_up_dispatch(self, split: bool, even: bool, slice_fn: Callable[..., Any] | None, mesh: Any) -> None:
        self.state = PartialState()
        self.split_batches = split
        self.slice_fn = slice_fn
        self.torch_device_mesh = mesh
        self.processes = self.state.num_processes
        self.process_index = self.state.process_index
        self._shares = shares_by_rank(mesh, self.processes)
        self._even = even
        self._current_counts: tuple[int, ...] | None = None
        self._rows = 1
        size = self._base_batch_size()
        if split and size is not None:
            batch_size_per_rank(size, self._share_count)

    @property
    def _share_count(self) -> int:
        return max(self._shares) + 1

    def _base_batch_size(self) -> int | None:
        size = self.base_dataloader.batch_size if self.batches is None else self.batches.batch_size
        return size if isinstance(size, int) else None

    def _total_length(self) -> int:
        batches = len(self.base_dataloader)
        if self.split_batches:
            return batches
        full_rounds, rest = divmod(batches, self._share_count)
        return full_rounds + bool(rest and not self._drop_last)

    @property
    def total_batch_size(self) -> int:
        """Samples in one round, over all processes."""
        size = self._base_batch_size() or 1
        return size if self.split_batches else size * self._share_count

    @property
    def even_batches(self) -> bool:
        """True if an incomplete last round is completed for every process."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even

    @property
    def remainder(self) -> int:
        """Samples in the current round if it is incomplete, otherwise 0; -1 before the last one."""
        if self._current_counts is not None:
            return sum(self._current_counts)
        return 0 if self.end_of_dataloader else -1

    def real_counts(self) -> tuple[int, ...] | None:
        """Return the number of real (not repeated) rows in the current round by process; ``None`` if all are real."""
        if self._current_counts is None:
            return None
        return tuple(self._current_counts[share] for share in self._shares)

    def present_counts(self) -> tuple[int, ...] | None:
        """Alias of `real_counts`: any round may have repetitions if batches are of several sizes."""
        return self.real_counts()

    @property
    def nominal_rows(self) -> int:
        """Rows of this process's part of a complete round."""
        return self.total_batch_size // self._share_count

    def last_rows(self) -> int:
        """Return the rows in this process's part of the current round, including repetitions."""
        return self._rows

    def own_state_dict(self) -> Any:
        """See `PreparedLoader`; ``None`` on a process that does not read."""
        return super().own_state_dict() if self.process_index == 0 else None

    def _open(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        self._current_counts = None
        group = host_group()
        if self.process_index == 0:
            return self._send_rounds(Sender(self.processes, group), self._read(skip, replay))
        if isinstance(self.base_dataloader.dataset, (IterDataPipe, MapDataPipe)):
            iter(self.base_dataloader)  # torch shares a seed between all processes here
        pinned = self._non_blocking and self.device is not None and self.device.type == "cuda"
        return self._receive_rounds(Receiver(group, pinned=pinned))

    def _read(self, skip: int, replay: dict[str, Any] | None) -> Lookahead:
        base, batches = self.base_dataloader, self.batches
        # True if reading begins after the epoch's first batch, which may be needed to complete the last round.
        needs_first = self.progress.position > 0 and (batches is not None or skip == 0)
        needs_first = needs_first and self._even and self._share_count > 1
        if batches is not None:
            batches.skip = skip * (1 if self.split_batches else self._share_count)
            batches.replay, batches.with_first = replay, needs_first
        snapshot = base.state_dict if self.stateful_base else None  # type: ignore[attr-defined]
        rounds = self._rounds(0 if batches is not None else skip, needs_first)
        lookahead = Lookahead(rounds, partial(window_depth, self.gradient_state), snapshot)
        if batches is None:
            with self._stream_rng.drawing(replay) as self.progress.order:
                lookahead.fill()
            return lookahead
        lookahead.fill()
        self.progress.order = batches.epoch.order
        return lookahead

    def _rounds(self, skip: int, needs_first: bool) -> Iterator[Outgoing | Failure]:
        splitter = BatchSplitter(
            shares=self._share_count, split=self.split_batches, even=self._even, drop_last=self._drop_last,
            nominal=None if self._base_batch_size() is None else self.nominal_rows, slice_fn=self.slice_fn,
        )  # fmt: skip
        encoders = [Encoder() for _ in range(self.processes)]
        try:
            if needs_first and self.batches is None:
                order = self._stream_rng.capture()
                splitter.first = self._read_first({})
                self._stream_rng.restore(order)
            source = self._iterate_base()
            if needs_first and self.batches is not None:
                self.batches.epoch.begin()
                name = "sampler" if self.base_dataloader.batch_sampler is None else "batch_sampler"
                with preserve_rng(self.base_dataloader):
                    splitter.first = self._read_first({name: [self.batches.epoch.first]})
            for batch_round in splitter.rounds(source, skip):
                yield self._outgoing(batch_round, encoders)
        except Exception as error:
            yield Failure(error)

    def _read_first(self, sampler: dict[str, Any]) -> Any:
        """Read the epoch's first batch as the loader inside does, without changing that loader or its data set."""
        base = copy.copy(self.base_dataloader)
        set_attributes(base, _iterator=None, next_iter_state=None, dataset=copy.copy(base.dataset), **sampler)
        return next(iter(base), None)

    def _outgoing(self, batch_round: Round, encoders: list[Encoder]) -> Outgoing:
        messages: list[torch.Tensor | None] = [None] * self.processes
        for rank in range(1, self.processes):
            part = batch_round.parts[self._shares[rank]]
            if part is not None:
                messages[rank] = encoders[rank].encode(part, batch_round.counts)
        return Outgoing(batch_round.parts[self._shares[0]], batch_round.counts, messages)

    def _send_rounds(self, sender: Sender, lookahead: Lookahead) -> Iterator[Any]:
        self._total = self._length_or_none()
        try:
            sender.open(self._next_sizes(lookahead))
            while (item := lookahead.peek()) is not None:
                next(lookahead)
                if isinstance(item, Failure):
                    sender.send(self._encode_failure(item), [0] * self.processes, None)
                    raise item.error
                self._count(lookahead)
                sender.send(item.messages, self._next_sizes(lookahead), self.batches_left)
                self._set_counts(item.local_batch, item.counts)
                yield item.local_batch
        finally:
            # Also if the epoch is left early: the parts of rounds yielded here must arrive, if their receivers live.
            with suppress(RuntimeError):
                sender.wait_sent()

    def _length_or_none(self) -> int | None:
        try:
            return None if self.batches is None else self._total_length()
        except TypeError:  # a sampler without length
            return None

    def _next_sizes(self, lookahead: Lookahead) -> list[int]:
        """Return the size in bytes of each rank's next message."""
        item = lookahead.peek()
        if item is None:
            return [0] * self.processes
        return [len(message) for message in self._encode_failure(item)] if isinstance(item, Failure) else item.sizes

    def _encode_failure(self, failure: Failure) -> list[torch.Tensor]:
        return [Encoder().encode(None, str(failure))] * self.processes

    def _receive_rounds(self, receiver: Receiver) -> Iterator[Any]:
        receiver.open()
        while not receiver.at_end:
            batch, note = receiver.receive()
            if isinstance(note, str):
                raise DataError(note)
            self.progress.position += 1
            self.end_of_dataloader = self.progress.ended = receiver.at_end
            remaining = 1 if receiver.at_end else receiver.remaining
            self._total = None if remaining is None else self.progress.position + remaining - 1
            self._set_counts(batch, note)
            yield batch

    def _set_counts(self, part: Any, counts: tuple[int, ...] | None) -> None:
        self._current_counts = counts
        if counts is not None or self.end_of_dataloader:
            self._rows = count_rows(part) or 1
