"""Prepared data loaders: this process's batches, on its device, with a known end and position."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.collectives.rng import fork_host_rng, synchronize_rng_states
from accel.data.batch_sampler import BatchSamplerShard, Share, get_sampler, pass_epoch
from accel.data.iterable import IterableDatasetShard, LastRoundItem
from accel.data.loader_state import Progress
from accel.data.rows import count_rows
from accel.data.shuffle import OrderRng
from accel.data.torch_loader import Lookahead, make_loader, preserve_rng, set_attributes, to_device_fn, window_depth
from accel.enums import RNGType
from accel.errors import ArgumentError
from accel.state import GradientState


class PreparedLoader(DataLoader[Any]):
    """A loader around ``base_dataloader``, a copy of the script's with our samplers.

    Other attributes are those of its base. While it is iterated it is the active loader of `GradientState`. A
    torchdata loader inside resumes from its own state.
    """

    end_of_dataloader: bool = False
    _counts: tuple[int, ...] | None

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self._set_up(*make_loader(dataset, use_stateful_dataloader, {"batch_sampler": batch_sampler, **kwargs}))

    def _set_up(
        self,
        base: DataLoader[Any],
        batches: BatchSamplerShard | None,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        rng_types: Sequence[RNGType | str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        processes: int | None = None,
        index: int | None = None,
        resumes: bool = False,
        shared: bool = False,
        mesh: Any = None,
        skip_batches: int = 0,
        iteration: int = 0,
    ) -> None:
        self.base_dataloader = base
        self.batches = batches
        self.device = device
        self.non_blocking = non_blocking
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.processes = processes or (1 if batches is None else batches.num_processes)
        self.process_index = index or (0 if batches is None else batches.process_index)
        self.stateful_base = hasattr(base, "load_state_dict")
        if batches is not None:
            batches.counted = self.stateful_base
        self.use_stateful_dataloader = resumes or self.stateful_base  # True: an interrupted epoch resumes by itself
        self.torch_device_mesh = mesh
        self.skip_batches = skip_batches
        self.progress = Progress()
        self.iteration = iteration
        self.gradient_state = GradientState()
        self._stream_rng = OrderRng([self._source, base], shared=shared)
        self.reset()
        if self.use_stateful_dataloader:
            with suppress(ImportError):
                kind: Any = type(self)
                self.__class__ = import_module("accel.data.stateful").stateful_kinds.get(kind, kind)

    @classmethod
    def wrap(cls, base: DataLoader[Any], batches: BatchSamplerShard | None, **kwargs: Any) -> PreparedLoader:
        """Return a loader around ``base`` itself; ``kwargs``: see `_set_up`."""
        loader = cls.__new__(cls)
        loader._set_up(base, batches, **kwargs)
        return loader

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        """Return the number of batches of one iteration. Raises `TypeError` for an iterable data set without length."""
        return max(0, self._total_length() - self.skip_batches)

    def _total_length(self) -> int:
        return len(self.base_dataloader) if self.batches is None else len(self.batches)

    @property
    def iteration(self) -> int:
        """The number of the current epoch, or of the next one."""
        return self.progress.here.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.progress.set_epoch(epoch)

    @property
    def position(self) -> int:
        """Batches yielded in the current epoch, including skipped ones: the number to skip on resuming.

        After a look at the first batch it is what it was before.
        """
        return self.progress.here.position

    @property
    def batches_left(self) -> int | None:
        """Batches left in the current epoch, including the current one; ``None`` if unknown.

        If ``None``, there are at least as many as the accumulation window needs.
        """
        if self._total is None:
            return None
        return self._total - self.progress.here.position + 1

    @property
    def total_batch_size(self) -> int:
        """Samples in one round, over all processes."""
        batch_size = self.base_dataloader.batch_size if self.batches is None else self.batches.own_batch_size
        return (batch_size or 1) * self.processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set. Raises `TypeError` if it has no length."""
        return len(self._source)

    @property
    def _source(self) -> Any:
        dataset = self.base_dataloader.dataset
        return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

    @property
    def even_batches(self) -> bool:
        """True if an incomplete last round is completed for every process."""
        owner = self._even_owner()
        return True if owner is None else owner.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        owner = self._even_owner()
        if owner is not None:
            owner.even_batches = even

    def _even_owner(self) -> Any:
        dataset = self.base_dataloader.dataset
        return dataset if isinstance(dataset, IterableDatasetShard) else self.batches

    @property
    def remainder(self) -> int:
        """Samples in the last round if it is incomplete, otherwise 0; -1 before it."""
        if self._counts is None:
            return 0 if self.end_of_dataloader else -1
        total = sum(self._counts)
        return 0 if total == self.total_batch_size else total

    @remainder.setter
    def remainder(self, rows: int) -> None:
        share = Share(samples=rows, batch=self.nominal_rows, processes=self.processes)
        self._counts = share.real_counts(0) if rows > 0 else None

    def real_counts(self) -> tuple[int, ...] | None:
        """Return the number of real (not repeated) samples in the current batch by process; ``None`` if all are."""
        return self._counts

    def last_rows(self) -> int:
        """Return the samples in this process's part of the current batch, including repetitions."""
        return self._rows or self.nominal_rows

    @property
    def nominal_rows(self) -> int:
        """Samples in this process's part of a complete round."""
        return self.total_batch_size // self.processes

    def get_sampler(self) -> Any:
        """Return the sampler that draws the epochs' orders."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler inside, from the next epoch on."""
        if self.batches is None:
            raise ArgumentError("set_sampler: an iterable data set has no sampler, it is read in its own order")
        self.batches.set_sampler(sampler)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one, and pass it to samplers and data sets that have ``set_epoch``."""
        self.progress.set_epoch(epoch)
        self._pass_epoch()

    def _pass_epoch(self) -> None:
        pass_epoch(self.iteration, self.batches, self.base_dataloader.dataset)

    def skipping(self, batches: int) -> PreparedLoader:
        """Return a view of this loader that skips the first ``batches`` of every epoch but counts them."""
        view = copy.copy(self)
        view.skip_batches = self.skip_batches + batches
        return view

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, base = self.progress, self.base_dataloader
        start = progress.begin()
        here, resumed = progress.here, start.order is not None
        finished = self.use_stateful_dataloader and start.ended
        skip = here.position = max(self.skip_batches, start.position if self.use_stateful_dataloader else 0)
        continues = resumed and not finished
        inner_fits = skip == start.position if continues else self._reuses_dataset
        if start.inner is not None and self.stateful_base and inner_fits:
            base.load_state_dict(start.inner)  # type: ignore[attr-defined]
            if continues:
                skip = 0
            else:  # the epoch is over: only the data set's state matters, from which the next epoch starts
                with preserve_rng(base):
                    set_attributes(base, _iterator=base._get_iterator())
        self._pass_epoch()
        if self.rng_types and not resumed:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.reset()
        with fork_host_rng() if resumed else nullcontext():  # draws of a resumed epoch were made before the checkpoint
            source = iter(()) if finished else self._open(skip, start.order)
        self.gradient_state._add_dataloader(self)
        batches = source if self.device is None else map(to_device_fn(self.device, self.non_blocking), source)
        try:
            yield from islice(batches, 1)
            progress.count_epoch(here)
            yield from batches
            progress.finish(here)
        finally:
            progress.leave(here)
            self.end()
            if isinstance(source, Generator):
                source.close()

    def _iterate_base(self) -> Iterator[Any]:
        """Start an iteration of the loader inside. Persistent workers draw their seed only in the first epoch."""
        base = self.base_dataloader
        restarts = base.persistent_workers and base._iterator is None and self.iteration > 0
        with preserve_rng(base) if restarts else nullcontext():
            return iter(base)

    @property
    def _reuses_dataset(self) -> bool:
        """True if a data set that has a state keeps it from one epoch to the next."""
        base = self.base_dataloader
        return hasattr(base.dataset, "state_dict") and (base.num_workers == 0 or base.persistent_workers)

    def reset(self) -> None:
        """Clear the end of the last epoch."""
        self.end_of_dataloader = False
        self._total: int | None = None
        self._counts = None
        self._rows: int | None = None

    def begin(self) -> None:
        """Become the active loader of `GradientState`, at the start of an epoch. Iteration calls it."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Stop being the active loader of `GradientState`. Iteration calls it."""
        self.gradient_state._remove_dataloader(self)

    def _open(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        """Begin an epoch; the iterator skips ``skip`` batches and keeps position, end and length up to date."""
        raise TypeError(f"{type(self).__name__} is a base: use DataLoaderShard or DataLoaderDispatcher")

    def _count(self, lookahead: Lookahead) -> None:
        """Count a batch that ``lookahead`` yielded; set the end and the length if they are known."""
        here = self.progress.here
        here.position += 1
        here.inner = lookahead.snapshot_here
        if lookahead.exhausted:
            self._total = here.position + len(lookahead)
            self.end_of_dataloader = here.ended = not len(lookahead)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state for a checkpoint, in types that a safe unpickler reads.

        ``epoch``, ``position``: the epoch, and the batches yielded in it.
        ``order``: the number, or the random states, that its order was drawn from.
        ``loader``: the state of a torchdata loader inside, as of reading the batch yielded last.
        ``generators``, ``seeds``: the random states and seeds of samplers and data sets.
        """
        state = {**self.progress.state_dict(), **self._rng.state_dict()}
        state.update(process=self.process_index, round=self.total_batch_size)
        inner = self.own_state_dict()
        return state if inner is None else {**state, "loader": inner}

    @property
    def _rng(self) -> OrderRng:
        return self._stream_rng if self.batches is None else self.batches.rng

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        The next epoch has the order of the one interrupted there. Its batches already yielded are skipped if the
        loader was prepared with ``use_stateful_dataloader`` or is one of torchdata's; otherwise the script skips them
        with `skip_first_batches`. The state of a torchdata loader is valid only on the process that saved it; others
        use the position. With another number of processes, or another batch size, the epoch continues after the same
        samples; if they do not fill complete rounds, some are repeated, and a warning states their number.
        """
        if "epoch" not in state_dict:
            raise ArgumentError("load_state_dict: not the state of a prepared loader: pass what state_dict() returned")
        self.progress.load_state_dict(state_dict, self.process_index, self.total_batch_size)
        self._rng.load_state_dict(state_dict)
        set_attributes(self.base_dataloader, _iterator=None)  # persistent workers restart, as in a new process

    def own_state_dict(self) -> Any:
        """Return the state of a torchdata loader inside, which may differ by process; ``None`` if not needed."""
        progress, base = self.progress, self.base_dataloader
        if not self.stateful_base or progress.saved.inner is not None:
            return progress.saved.inner
        needed = progress.running or (self._reuses_dataset and base._iterator is not None)
        return base.state_dict() if needed else None  # type: ignore[attr-defined]

    def load_own_state_dict(self, state: Any) -> None:
        """Restore what `own_state_dict` returned on this process. Call it after `load_state_dict`."""
        self.progress.set_inner(state)


class DataLoaderShard(PreparedLoader):
    """A loader of this process's share of a data set that every process reads.

    Samples are not read ahead, except from iterable data sets, as their end is not known in advance: one batch,
    or with gradient accumulation as many as make a window. ``kwargs`` are those of `DataLoader`;
    ``batch_sampler`` may be a `BatchSamplerShard`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType | str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        base, batches = make_loader(dataset, use_stateful_dataloader, kwargs)
        self._set_up(
            base,
            batches,
            device=device,
            non_blocking=_non_blocking,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            mesh=torch_device_mesh,
            skip_batches=skip_batches,
            iteration=iteration,
        )

    def _open(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        if self.batches is None:
            return self._stream(skip, replay)
        self.batches.skip, self.batches.replay = skip, replay
        self.batches.ahead = window_depth(self.gradient_state)
        source = self._iterate_base()
        epoch = self.batches.epoch
        epoch.begin()
        self.progress.here.order = epoch.order
        return self._follow(source)

    def _follow(self, source: Iterator[Any]) -> Iterator[Any]:
        batches, here = self.batches, self.progress.here
        assert batches is not None
        epoch = batches.epoch
        for batch in source:
            here.position += 1
            if self._total is None:
                self._total = epoch.total
            if here.position == self._total:
                self.end_of_dataloader = here.ended = True
                self._counts = epoch.last_counts
                self._rows = batches.last_rows() if epoch.last_counts else None
            yield batch

    def _stream(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        base = self.base_dataloader
        # Draws in this block are repeated on resuming: an order drawn at the start, the seeds of workers.
        with self._stream_rng.drawing(replay) as self.progress.here.order:
            source = self._iterate_base()
            for _ in range(skip):
                next(source, None)
            snapshot = base.state_dict if self.stateful_base else None  # type: ignore[attr-defined]
            lookahead = Lookahead(source, partial(window_depth, self.gradient_state), snapshot)
            lookahead.fill()
        return self._look_ahead(lookahead)

    def _look_ahead(self, lookahead: Lookahead) -> Iterator[Any]:
        for batch in lookahead:
            self._count(lookahead)
            real = None
            if isinstance(batch, LastRoundItem):
                batch, real = batch
            elif self.end_of_dataloader and self.processes == 1 and self.base_dataloader.batch_size is not None:
                real = self._rows = count_rows(batch)
            if real is not None and self.end_of_dataloader:
                self._counts = Share(samples=real, batch=self.nominal_rows, processes=self.processes).real_counts(0)
            yield batch
