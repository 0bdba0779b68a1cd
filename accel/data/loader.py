"""Prepared data loaders: this process's batches, on its device, with a known end and position."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.collectives.rng import host_rng_state, set_host_rng_state, synchronize_rng_states
from accel.data.batch_sampler import BatchSamplerShard
from accel.data.iterable import IterableDatasetShard, LastRoundItem
from accel.data.loader_state import Progress
from accel.data.rows import count_rows
from accel.data.shard_math import Share
from accel.data.shuffle import OrderRng
from accel.data.torch_loader import (
    Lookahead,
    blank,
    get_sampler,
    make_loader,
    preserve_rng,
    set_attributes,
    stateful_kind,
    to_device_fn,
    window_depth,
)
from accel.enums import RNGType
from accel.errors import ArgumentError
from accel.state import GradientState


class PreparedLoader(DataLoader[Any]):
    """A loader around ``base_dataloader``, a copy of the script's with our samplers.

    Other attributes are those of its base. While it is iterated it is the active loader of `GradientState`. A
    torchdata loader inside resumes from its own state.
    """

    _drop_last: bool
    _non_blocking: bool
    end_of_dataloader: bool = False

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
        drop_last: bool | None = None,
        rng_types: Sequence[RNGType | str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        processes: int = 1,
        index: int = 0,
        resumes: bool = False,
        shared: bool = False,
    ) -> None:
        self.base_dataloader = base
        self.batches = batches
        self.device = device
        self._non_blocking = non_blocking
        self._drop_last = bool(base.drop_last if drop_last is None else drop_last)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.processes = processes
        self.process_index = index
        self.stateful_base = hasattr(base, "load_state_dict")
        if batches is not None:
            batches.counted = self.stateful_base
        self.resumes = resumes or self.stateful_base
        self.skip_batches = 0
        self.progress = Progress()
        self.gradient_state = GradientState()
        self._stream_rng = OrderRng([self._source, base], shared=shared)
        self._real: int | None = None
        self._total: int | None = None
        if self.resumes:
            kind: Any = type(self)
            self.__class__ = stateful_kind(kind)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if a loader that was saved in mid-epoch resumes there by itself."""
        return self.resumes

    def __reduce__(self) -> Any:
        return blank, (getattr(type(self), "plain_kind", type(self)), self.resumes), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "gradient_state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gradient_state=GradientState())

    def __len__(self) -> int:
        """Return the number of batches of one iteration. Raises `TypeError` for an iterable data set without length."""
        return max(0, self._total_length() - self.skip_batches)

    def _total_length(self) -> int:
        return len(self.base_dataloader) if self.batches is None else len(self.batches)

    @property
    def non_blocking(self) -> bool:
        """True if copies to the device are asynchronous."""
        return self._non_blocking

    @property
    def iteration(self) -> int:
        """The number of the current epoch, or of the next one."""
        return self.progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.progress.set_epoch(epoch)

    @property
    def position(self) -> int:
        """Batches yielded in the current epoch, including skipped ones: the number to skip on resuming."""
        return self.progress.position

    @property
    def batches_left(self) -> int | None:
        """Batches left in the current epoch, including the current one; ``None`` if unknown.

        If ``None``, there are at least as many as the accumulation window needs.
        """
        if self._total is None:
            return None
        return self._total - self.progress.position + 1

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
        """Samples in the last round if it is incomplete, otherwise 0; -1 before it is known."""
        counts = self.real_counts()
        if counts is None:
            return -1 if self.batches is None and not self.end_of_dataloader else 0
        total = sum(counts)
        return 0 if total == self.total_batch_size else total

    def real_counts(self) -> tuple[int, ...] | None:
        """Return the number of real (not repeated) samples in the last round by process; ``None`` if all or unknown."""
        if self.batches is not None:
            return self.batches.epoch.last_counts
        if self._real is None:
            return None
        return Share(samples=self._real, batch=self.nominal_rows, processes=self.processes).real_counts(0)

    def present_counts(self) -> tuple[int, ...] | None:
        """Return `real_counts` of the current batch; ``None`` if no sample in it is known to be a repetition."""
        return self.real_counts() if self.end_of_dataloader else None

    def last_rows(self) -> int:
        """Return the samples in this process's part of the last round, including repetitions."""
        if self.batches is None:
            return self._real or self.nominal_rows if self.processes == 1 else self.nominal_rows
        return self.batches.last_rows()

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
        if self.batches is not None:
            self.batches.set_epoch(self.progress.epoch)
        dataset = self.base_dataloader.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.progress.epoch)

    def skipping(self, batches: int) -> PreparedLoader:
        """Return a view of this loader that skips the first ``batches`` of every epoch but counts them."""
        if batches < 0:
            raise ArgumentError(f"skip_first_batches: num_batches must be 0 or more, got {batches}")
        view = copy.copy(self)
        view.skip_batches = self.skip_batches + batches
        return view

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, base = self.progress, self.base_dataloader
        finished = self.resumes and progress.resumed and progress.ended
        start, replay, inner = progress.begin()
        resumed = replay is not None
        skip = progress.position = max(self.skip_batches, start) if self.resumes else self.skip_batches
        continues = resumed and not finished
        if inner is not None and self.stateful_base and (skip == start if continues else self._reuses_dataset):
            base.load_state_dict(inner)  # type: ignore[attr-defined]
            if continues:
                skip = 0
            else:  # the epoch is over: only the data set's state matters, from which the next epoch starts
                with preserve_rng(base):
                    set_attributes(base, _iterator=base._get_iterator())
        self._pass_epoch()
        if self.rng_types and not resumed:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.reset()
        rng_state = host_rng_state()
        source = iter(()) if finished else self._open(skip, replay)
        if resumed:  # these draws were already made before the checkpoint
            set_host_rng_state(rng_state)
        self.gradient_state._add_dataloader(self)
        try:
            yield from source if self.device is None else map(to_device_fn(self.device, self._non_blocking), source)
        finally:
            self.end()
            if isinstance(source, Generator):
                source.close()
        progress.finish()

    def _iterate_base(self) -> Iterator[Any]:
        """Start an iteration of the loader inside. Persistent workers draw their seed only in the first epoch."""
        base = self.base_dataloader
        restarts = base.persistent_workers and base._iterator is None and self.progress.epoch > 0
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
        self._real = self._total = None

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
        self.progress.position += 1
        self.progress.inner = lookahead.snapshot_here
        if lookahead.exhausted:
            self._total = self.progress.position + len(lookahead)
            self.end_of_dataloader = self.progress.ended = not len(lookahead)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state for a checkpoint, in types that a safe unpickler reads.

        ``epoch``, ``position``: the epoch, and the batches yielded in it.
        ``order``: the random state that its order was drawn from.
        ``loader``: the state of a torchdata loader inside, as of reading the batch yielded last.
        ``generators``, ``seeds``: the random states and seeds of samplers and data sets.
        """
        state = {**self.progress.state_dict(), "generators": self._rng.generator_states(), "seeds": self._rng.seeds()}
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
        self._rng.set_generator_states(state_dict["generators"])
        self._rng.set_seeds(state_dict.get("seeds", []))
        set_attributes(self.base_dataloader, _iterator=None)  # persistent workers restart, as in a new process

    def own_state_dict(self) -> Any:
        """Return the state of a torchdata loader inside, which may differ by process; ``None`` if not needed."""
        progress, base = self.progress, self.base_dataloader
        if not self.stateful_base or progress.inner is not None:
            return progress.inner
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
            drop_last=_drop_last or base.drop_last,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            processes=1 if batches is None else batches.num_processes,
            index=0 if batches is None else batches.process_index,
        )
        self.torch_device_mesh = torch_device_mesh
        self.skip_batches = skip_batches
        self.iteration = iteration

    @classmethod
    def wrap(cls, base: DataLoader[Any], batches: BatchSamplerShard | None, **kwargs: Any) -> DataLoaderShard:
        """Return a loader around ``base`` itself; ``kwargs``: see `PreparedLoader._set_up`."""
        loader = cls.__new__(cls)
        loader._set_up(base, batches, **kwargs)
        return loader

    def _open(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        if self.batches is None:
            return self._stream(skip, replay)
        self.batches.skip, self.batches.replay = skip, replay
        self.batches.ahead = window_depth(self.gradient_state)
        source = self._iterate_base()
        epoch = self.batches.epoch
        epoch.begin()
        self.progress.order = epoch.order
        self._total = epoch.total
        return self._follow(source)

    def _follow(self, source: Iterator[Any]) -> Iterator[Any]:
        assert self.batches is not None
        epoch, progress = self.batches.epoch, self.progress
        total = epoch.total
        for position, batch in enumerate(source, progress.position + 1):
            progress.position = position
            if total is None:
                total = self._total = epoch.total
            if total is not None and position >= total:
                self.end_of_dataloader = progress.ended = True
            yield batch

    def _stream(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        base = self.base_dataloader
        # Draws in this block are repeated on resuming: an order drawn at the start, the seeds of workers.
        with self._stream_rng.drawing(replay) as self.progress.order:
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
            if isinstance(batch, LastRoundItem):
                batch, self._real = batch
            elif self.end_of_dataloader and self.processes == 1 and self.base_dataloader.batch_size is not None:
                self._real = count_rows(batch)
            yield batch
