"""Data loaders: which samples are whose (`sharding`), in which order (`order`), and placing them (`loader`)."""

from __future__ import annotations

from accel.data.loader import DataLoaderShard, skip_first_batches
from accel.data.order import SeedableRandomSampler
from accel.data.prepare import prepare_data_loader
from accel.data.sharding import ShardedBatchSampler, Share

__all__ = [
    "DataLoaderShard",
    "SeedableRandomSampler",
    "ShardedBatchSampler",
    "Share",
    "prepare_data_loader",
    "skip_first_batches",
]
