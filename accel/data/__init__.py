"""Data loaders: which samples are whose (`sharding`), in which order (`order`), and placing them (`loader`).

`dispatch` is the other way: the main process reads, and sends each process its part.
"""

from __future__ import annotations

from accel.data.base import get_sampler
from accel.data.dispatch import DataLoaderDispatcher
from accel.data.iterable import IterableDatasetShard
from accel.data.loader import DataLoaderShard, PreparedLoader
from accel.data.order import SeedableRandomSampler
from accel.data.prepare import prepare_data_loader
from accel.data.sharding import BatchSamplerShard, Share
from accel.data.skipping import SkipBatchSampler, SkipDataLoader, skip_first_batches

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
