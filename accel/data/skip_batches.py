"""Leaving out the first batches of a loader."""

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
    """Yields what ``batch_sampler`` yields, but for its first ``skip_batches`` batches.

    Where those can be passed over without being made, they are.
    """

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
        """Batches with those left out."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers inside which epoch comes next, those that want to know."""
        for part in (self.batch_sampler, self.sampler):
            listener = getattr(part, "set_epoch", None)
            if listener is not None:
                listener(epoch)


class SkipDataLoader(DataLoaderShard):
    """A loader of one process that leaves out the first ``skip_batches`` batches of each epoch.

    ``kwargs`` are those of `DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that leaves out the first ``num_batches`` batches of ``dataloader``.

    All settings are kept. Where the sampler can be indexed nothing is read to get there. A prepared loader and what is
    returned share epoch and position. Raises `ArgumentError` for a negative number.
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
