"""Skipping of a loader's first batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel.data.batch_sampler import BatchSamplerShard
from accel.data.loader import DataLoaderShard, PreparedLoader
from accel.data.torch_loader import alter
from accel.errors import ArgumentError


class SkipBatchSampler(BatchSampler):
    """The batches of ``batch_sampler`` without the first ``skip_batches``, which are not computed if possible."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        if skip_batches < 0:
            raise ArgumentError(f"SkipBatchSampler: {skip_batches} batches cannot be skipped, it must be 0 or more")
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    def __iter__(self) -> Iterator[Any]:
        source = self.batch_sampler
        if isinstance(source, BatchSamplerShard):
            return islice(iter(source), self.skip_batches, None)
        walker = BatchSamplerShard(source)
        walker.skip = self.skip_batches
        return iter(walker)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    @property
    def total_length(self) -> int:
        """Batches including those skipped."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the samplers inside that have ``set_epoch``."""
        for part in (self.batch_sampler, self.sampler):
            listener = getattr(part, "set_epoch", None)
            if listener is not None:
                listener(epoch)


class SkipDataLoader(DataLoaderShard):
    """A loader for one process that skips the first ``skip_batches`` batches of each epoch.

    ``kwargs`` are those of `DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first ``num_batches`` batches of ``dataloader``.

    All settings are kept. If the sampler can be indexed, skipping reads nothing. A prepared loader and the
    returned one share epoch and position. Raises `ArgumentError` for a negative number.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if num_batches < 0:
        raise ArgumentError(f"skip_first_batches: {num_batches} batches cannot be skipped, it must be 0 or more")
    base = copy.copy(dataloader)
    if isinstance(base.dataset, IterableDataset):
        skipping = DataLoaderShard.around(base, None)
        skipping.skip_batches = num_batches
        return skipping
    if base.batch_sampler is None:
        alter(base, sampler=SkipBatchSampler(base.sampler, num_batches))
    else:
        alter(base, batch_sampler=SkipBatchSampler(base.batch_sampler, num_batches))
    return base
