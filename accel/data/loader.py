"""The loader that `Accelerator.prepare` returns: this process's batches, on its device, its end and position known."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.data.iterable import IterableShard, Marked
from accel.data.progress import Progress
from accel.data.sharding import ShardedBatchSampler
from accel.data.share import Share
from accel.enums import RNGType
from accel.errors import ArgumentError
from accel.nested import send_to_device
from accel.random import synchronize_rng_states
from accel.state import GradientState


class DataLoaderShard(DataLoader[Any]):
    """Iterates ``base``, a copy of the user's loader whose samplers give this process's share.

    It is a `DataLoader` and answers what ``base`` answers. While it is iterated it is the active loader of
    `GradientState`. No sample is read ahead of the batch that is given, except from iterable data sets, whose end
    shows in no other way.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        batches: ShardedBatchSampler | None,
        *,
        device: torch.device | None = None,
        non_blocking: bool = False,
        rng_types: Sequence[RNGType | str] = (),
        processes: int = 1,
        resumes: bool = False,
    ) -> None:
        self.base_dataloader = base
        self.batches = batches
        self.device = device
        self.non_blocking = non_blocking
        self.rng_types = rng_types
        self.processes = processes
        self.resumes = resumes
        self.skip_batches = 0
        self.progress = Progress()
        self.end_of_dataloader = False
        self.gradient_state = GradientState()
        self._real: int | None = None
        self._total: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        """Batches that one iteration gives. Raises `TypeError` for an iterable data set without length."""
        return max(0, self._whole_length() - self.skip_batches)

    def _whole_length(self) -> int:
        return len(self.base_dataloader) if self.batches is None else len(self.batches)

    @property
    def iteration(self) -> int:
        """The number of the running epoch, or of the next one."""
        return self.progress.epoch

    @property
    def position(self) -> int:
        """Batches given in the running epoch, those skipped included: what to skip on resuming."""
        return self.progress.position

    @property
    def batches_left(self) -> int | None:
        """Batches of the running epoch from the present one on, itself included; ``None`` if that is not known."""
        if self._total is None:
            return None
        return self._total - self.progress.position + 1

    @property
    def total_batch_size(self) -> int:
        """Samples in one round, over all processes."""
        own = self.base_dataloader.batch_size if self.batches is None else self.batches.batch_size
        return (own or 1) * self.processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set. Raises `TypeError` where it has no length."""
        dataset: Any = self.base_dataloader.dataset
        return len(dataset.dataset if isinstance(dataset, IterableShard) else dataset)

    @property
    def remainder(self) -> int:
        """Samples in the last round if it is incomplete, else 0; -1 before it is known."""
        counts = self.real_counts()
        if counts is None:
            return -1 if self.batches is None else 0
        total = sum(counts)
        return 0 if total == self.total_batch_size else total

    def real_counts(self) -> tuple[int, ...] | None:
        """Samples of the last round that are no repetitions, by process; ``None`` if all are or if not known."""
        if self.batches is not None:
            return self.batches.epoch.last_counts
        if self._real is None:
            return None
        size = self.total_batch_size // self.processes
        return Share(samples=self._real, batch=size, processes=self.processes).real_counts(0)

    def last_rows(self) -> int:
        """Samples in this process's part of the last round, repetitions included."""
        if self.batches is None:
            return self.total_batch_size // self.processes
        return self.batches.last_rows()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one: shuffles that depend on it, and data sets that want to know, are told."""
        self.progress.set_epoch(epoch)
        self._announce()

    def _announce(self) -> None:
        if self.batches is not None:
            self.batches.set_epoch(self.progress.epoch)
        dataset = self.base_dataloader.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.progress.epoch)

    def skipping(self, batches: int) -> DataLoaderShard:
        """A view of this loader that leaves out the first ``batches`` of every epoch, counting them as given."""
        if batches < 0:
            raise ArgumentError(f"skip_first_batches: {batches} batches cannot be skipped, it must be 0 or more")
        view = copy.copy(self)
        view.skip_batches = self.skip_batches + batches
        return view

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = self.progress
        skip = max(self.skip_batches, progress.position) if self.resumes and progress.resumed else self.skip_batches
        replay = progress.begin()
        progress.position = skip
        self.end_of_dataloader = False
        self._real = self._total = None
        source = self._start(skip, replay)
        self.gradient_state._add_dataloader(self)
        try:
            for batch in source:
                yield batch if self.device is None else send_to_device(batch, self.device, self.non_blocking)
        finally:
            self.gradient_state._remove_dataloader(self)
        progress.finish()

    def _start(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        self._announce()
        if self.rng_types:
            synchronize_rng_states(self.rng_types)
        # A resumed epoch has drawn the seed of its workers before: drawing it again must not move the generator on.
        kept = None if replay is None else torch.get_rng_state()
        sampled = self._sampled(skip, replay) if self.batches is not None else self._streamed(skip)
        if kept is not None:
            torch.set_rng_state(kept)
        return sampled

    def _sampled(self, skip: int, replay: dict[str, Any] | None) -> Iterator[Any]:
        assert self.batches is not None
        self.batches.skip, self.batches.replay = skip, replay
        source = iter(self.base_dataloader)
        epoch = self.batches.epoch
        epoch.begin()
        self.progress.order = epoch.order
        self._total = self._known_length() if epoch.total is None else epoch.total
        return self._follow(source)

    def _known_length(self) -> int | None:
        try:
            return self._whole_length()
        except TypeError:
            return None

    def _follow(self, source: Iterator[Any]) -> Iterator[Any]:
        assert self.batches is not None
        epoch, progress = self.batches.epoch, self.progress
        for batch in source:
            progress.position += 1
            if epoch.total is not None and progress.position >= epoch.total:
                self._total, self.end_of_dataloader = epoch.total, True
            yield batch

    def _streamed(self, skip: int) -> Iterator[Any]:
        self._total = self._known_length()
        return self._look_ahead(iter(self.base_dataloader), skip)

    def _look_ahead(self, source: Iterator[Any], skip: int) -> Iterator[Any]:
        for _ in range(skip):
            next(source, None)
        nothing = object()
        following = next(source, nothing)
        while (batch := following) is not nothing:
            following = next(source, nothing)
            self.progress.position += 1
            if following is nothing:
                self._total, self.end_of_dataloader = self.progress.position, True
            if isinstance(batch, Marked):
                batch, self._real = batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, for a checkpoint: small, and of types that a safe unpickler reads."""
        generators = [] if self.batches is None else self.batches.rng.generator_states()
        return {**self.progress.state_dict(), "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken.

        The next epoch has the order of the one interrupted there. Its batches already given are left out if the loader
        was prepared with ``use_stateful_dataloader``; else the script leaves them out with `skip_first_batches`.
        """
        self.progress.load_state_dict(state)
        if self.batches is not None:
            self.batches.rng.set_generator_states(state["generators"])


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that leaves out the first ``num_batches`` batches of ``dataloader``.

    Where the sampler can be indexed nothing is read to get there. A prepared loader and what is returned share epoch
    and position. Raises `ArgumentError` for a negative number.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    from accel.data.prepare import prepare_data_loader

    return prepare_data_loader(dataloader, num_processes=1, process_index=0).skipping(num_batches)
