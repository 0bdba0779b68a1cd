"""Data loaders: sharding over processes (`batch_sampler`), shuffling (`shuffle`), device placement (`loader`).

With `dispatcher` the main process reads, and sends each process its part.
"""

from __future__ import annotations

from accel.data.batch_sampler import BatchSamplerShard, Share, SkipBatchSampler, get_sampler
from accel.data.dispatcher import DataLoaderDispatcher
from accel.data.iterable import IterableDatasetShard
from accel.data.loader import DataLoaderShard, PreparedLoader
from accel.data.prepare import SkipDataLoader, prepare_data_loader, skip_first_batches
from accel.data.shuffle import SeedableRandomSampler

# Accelerate's names for what its loaders have in common, here one class.
DataLoaderAdapter = PreparedLoader
DataLoaderStateMixin = PreparedLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "PreparedLoader",
    "SeedableRandomSampler",
    "Share",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
