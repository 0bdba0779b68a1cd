"""A loader whose data only the main process reads. It sends the data in rounds, a part to each process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import IterDataPipe, MapDataPipe

from accel.collectives.rng import fork_host_rng
from accel.data.batch_sampler import batch_size_per_rank, shares_by_rank
from accel.data.loader import PreparedLoader
from accel.data.rows import count_rows, join_rows, take_rows
from accel.data.torch_loader import Lookahead, make_loader, preserve_rng, set_attributes, window_depth
from accel.data.transfer import Receiver, Sender, encode, host_group
from accel.errors import DataError
from accel.state import PartialState

# Rounds, into which the main process groups the batches that it reads.
#
# A round is one batch for each share or, for split batches, one batch cut into as many parts. With ``even_batches``,
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
    even_batches: bool
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
            if self.first is None and self.even_batches and self.shares > 1:
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
        if whole_batches and (equal_sizes or (not self.even_batches and len(round_batches) == self.shares)):
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
        if rest and self.even_batches:
            joined = self._completed(joined, self.shares - rest)
            share_rows, rest = share_rows + 1, 0
        edges = [share * share_rows + min(share, rest) for share in range(self.shares + 1)]
        parts = [self._slice(joined, *edge, share) for share, edge in enumerate(pairwise(edges))]
        return Round(parts, self._counted([min(end, rows) - min(start, rows) for start, end in pairwise(edges)]))

    def _counted(self, sizes: list[int | None]) -> tuple[int, ...] | None:
        nominal = sizes[0] if self.nominal is None else self.nominal
        if all(size == nominal or size is None for size in sizes):
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

    def _slice(self, joined: Any, start: int, end: int, share: int) -> Any:
        if start == end:
            return None
        slicer = take_rows if self.slice_fn is None else self.slice_fn
        return slicer(joined, slice(start, end), process_index=share, num_processes=self.shares)

    def _filled(self, round_batches: list[Any], sizes: list[int | None]) -> Round:
        """Return a round of batches that cannot be cut; shares without one get the epoch's first batch."""
        missing = self.shares - len(round_batches)
        if not self.even_batches or missing == 0:
            return Round([*round_batches, *[None] * missing])
        return Round([*round_batches, *[self.first] * missing], (*[size or 1 for size in sizes], *[0] * missing))


# The loader.


class Outgoing(NamedTuple):
    """A round ready to send, or the failure to read one: the main process's own part, and the messages by rank."""

    messages: dict[int, Tensor]
    local_batch: Any = None
    counts: tuple[int, ...] | None = None
    failure: Exception | None = None


def _messages(lookahead: Lookahead) -> dict[int, Tensor]:
    item = lookahead.peek()
    return {} if item is None else item.messages


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
        self._set_up(
            base, batches, split=split_batches, slice_fn=slice_fn, device=PartialState().device,
            non_blocking=_non_blocking, drop_last=_drop_last, mesh=torch_device_mesh, skip_batches=skip_batches,
            iteration=iteration,
        )  # fmt: skip

    def _set_up(
        self,
        *args: Any,
        split: bool = False,
        even: bool = True,
        slice_fn: Callable[..., Any] | None = None,
        drop_last: bool = False,
        **kwargs: Any,
    ) -> None:
        super()._set_up(*args, **kwargs)
        state, size = PartialState(), (self.base_dataloader if self.batches is None else self.batches).batch_size
        self.processes, self.process_index = state.num_processes, state.process_index
        self.stateful_base = self.stateful_base and self.process_index == 0  # only the main process reads
        self._shares = shares_by_rank(self.torch_device_mesh, self.processes)
        self._splitter = BatchSplitter(
            shares=max(self._shares) + 1, split=split, even_batches=even, drop_last=drop_last, slice_fn=slice_fn
        )
        if isinstance(size, int):
            self._splitter.nominal = batch_size_per_rank(size, self._splitter.shares) if split else size

    def _total_length(self) -> int:
        batches = len(self.base_dataloader)
        if self._splitter.split:
            return batches
        full_rounds, rest = divmod(batches, self._splitter.shares)
        return full_rounds + bool(rest and not self._splitter.drop_last)

    @property
    def total_batch_size(self) -> int:
        """Samples in one round, over all processes."""
        if self._splitter.nominal is None and self._splitter.split:
            return 1
        return (self._splitter.nominal or 1) * self._splitter.shares

    def _even_owner(self) -> Any:
        return self._splitter

    @property
    def nominal_rows(self) -> int:
        """Rows of a part of a complete round."""
        return self._splitter.nominal or self._rows or 1

    def _open(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        group = host_group()
        if self.process_index == 0:
            return self._send_rounds(Sender(group), self._read(skip, replay))
        if isinstance(self.base_dataloader.dataset, (IterDataPipe, MapDataPipe)):
            iter(self.base_dataloader)  # torch shares a seed between all processes here
        pinned = self.non_blocking and self.device is not None and self.device.type == "cuda"
        return self._receive_rounds(Receiver(group, pinned=pinned))

    def _read(self, skip: int, replay: dict[str, Any] | None) -> Lookahead:
        base, batches = self.base_dataloader, self.batches
        # True if reading begins after the epoch's first batch, which may be needed to complete the last round.
        needs_first = self.progress.here.position > 0 and (batches is not None or skip == 0)
        needs_first = needs_first and self.even_batches and self._splitter.shares > 1
        if batches is not None:
            batches.skip = skip * (1 if self._splitter.split else self._splitter.shares)
            batches.replay, batches.with_first = replay, needs_first
        snapshot = base.state_dict if self.stateful_base else None  # type: ignore[attr-defined]
        rounds = self._rounds(0 if batches is not None else skip, needs_first)
        lookahead = Lookahead(rounds, partial(window_depth, self.gradient_state), snapshot)
        if batches is None:
            with self._stream_rng.drawing(replay) as self.progress.here.order:
                lookahead.fill()
            return lookahead
        lookahead.fill()
        self.progress.here.order = batches.epoch.order
        return lookahead

    def _rounds(self, skip: int, needs_first: bool) -> Iterator[Outgoing]:
        splitter = replace(self._splitter)
        ranks = list(range(1, self.processes))
        try:
            if needs_first and self.batches is None:
                generators = self._stream_rng.state_dict()
                with fork_host_rng():
                    splitter.first = self._read_first({})
                self._stream_rng.load_state_dict(generators)
            source = self._iterate_base()
            if needs_first and self.batches is not None:
                self.batches.epoch.begin()
                name = "sampler" if self.base_dataloader.batch_sampler is None else "batch_sampler"
                with preserve_rng(self.base_dataloader):
                    splitter.first = self._read_first({name: [self.batches.epoch.first]})
            for batch_round in splitter.rounds(source, skip):
                parts = [batch_round.parts[share] for share in self._shares]
                # A process that has no part in a round ends its epoch before it.
                ranks = [rank for rank in ranks if parts[rank] is not None]
                messages = {rank: encode((parts[rank], batch_round.counts, None)) for rank in ranks}
                yield Outgoing(messages, parts[0], batch_round.counts)
        except Exception as error:
            reason = f"process 0, which reads the data for all, failed: {type(error).__name__}: {error}"
            yield Outgoing({rank: encode((None, None, reason)) for rank in ranks}, failure=error)

    def _read_first(self, sampler: dict[str, Any]) -> Any:
        """Read the epoch's first batch as the loader inside does, without changing that loader or its data set."""
        base = copy.copy(self.base_dataloader)
        set_attributes(base, _iterator=None, next_iter_state=None, dataset=copy.copy(base.dataset), **sampler)
        return next(iter(base), None)

    def _send_rounds(self, sender: Sender, lookahead: Lookahead) -> Iterator[Any]:
        if self.batches is not None:
            with suppress(TypeError):  # a sampler without length
                self._total = self._total_length()
        try:
            sender.open(range(1, self.processes), _messages(lookahead))
            while (item := lookahead.peek()) is not None:
                next(lookahead)
                if item.failure is not None:
                    sender.send(item.messages, {}, None)
                    raise item.failure
                self._count(lookahead)
                sender.send(item.messages, _messages(lookahead), self.batches_left)
                self._set_counts(item.local_batch, item.counts)
                yield item.local_batch
        finally:
            # Also if the epoch is left early: the parts of rounds yielded here must arrive, if their receivers live.
            with suppress(RuntimeError):
                sender.wait_sent()

    def _receive_rounds(self, receiver: Receiver) -> Iterator[Any]:
        for batch, counts, failure in receiver:
            if failure is not None:
                raise DataError(failure)
            here = self.progress.here
            here.position += 1
            self.end_of_dataloader = here.ended = receiver.at_end
            self._total = None if receiver.remaining is None else here.position + receiver.remaining - 1
            self._set_counts(batch, counts)
            yield batch

    def _set_counts(self, part: Any, counts: tuple[int, ...] | None) -> None:
        self._counts = None if counts is None else tuple(counts[share] for share in self._shares)
        if counts is not None or self.end_of_dataloader:
            self._rows = max(counts) if counts and not self.even_batches else count_rows(part) or 1
