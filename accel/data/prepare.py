"""Turning a script's `DataLoader` into this process's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel import collectives
from accel.data.iterable import IterableShard, MarkedCollate
from accel.data.loader import DataLoaderShard
from accel.data.order import SeedableRandomSampler
from accel.data.sharding import ShardedBatchSampler
from accel.enums import RNGType
from accel.errors import DataError
from accel.state import PartialState


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[RNGType | str] | None = None,
    even_batches: bool = True,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> DataLoaderShard:
    """Return a loader that gives process ``process_index`` of ``num_processes`` its share of ``dataloader``.

    ``dataloader`` itself is not changed and all its settings are kept. One that is prepared already is returned as it
    is, and one whose sampler is torch's `DistributedSampler` is not shared out a second time. Batches are put on
    ``device`` if ``put_on_device``. ``rng_types`` says which generators are made equal on all processes when an epoch
    begins: by default (``["generator"]``) those that the order is drawn from. For the other arguments see
    `DataLoaderConfiguration`. Raises `DataError` for a loader that cannot be shared out as asked.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader
    processes = PartialState().num_processes if num_processes is None else num_processes
    index = PartialState().process_index if process_index is None else process_index
    kinds = [str(kind) for kind in (["generator"] if rng_types is None else rng_types)]
    base = copy.copy(dataloader)
    if use_seedable_sampler:
        _make_seedable(base, data_seed)
    batches = None
    if isinstance(base.dataset, IterableDataset):
        _share_stream(base, processes, index, split_batches, even_batches)
    else:
        batches = _share_sampler(
            base, processes=processes, index=index, split=split_batches, even=even_batches, shared="generator" in kinds
        )
    return DataLoaderShard(
        base,
        batches,
        device=device if put_on_device else None,
        non_blocking=non_blocking,
        rng_types=[kind for kind in kinds if kind != "generator"],
        processes=processes,
        resumes=use_stateful_dataloader,
    )


def _set(loader: DataLoader[Any], **attributes: Any) -> None:
    # DataLoader forbids assigning these after its construction, because an iterator in flight would not see it; this is
    # a fresh copy that nothing iterates.
    vars(loader).update(attributes)


def _share_sampler(base: DataLoader[Any], **how: Any) -> ShardedBatchSampler:
    batches = ShardedBatchSampler(base.sampler if base.batch_sampler is None else base.batch_sampler, **how)
    if base.batch_sampler is None:
        _set(base, sampler=batches)
    else:
        _set(base, batch_sampler=batches)
    return batches


def _share_stream(base: DataLoader[Any], processes: int, index: int, split: bool, even: bool) -> None:
    if processes == 1:
        return
    size = base.batch_size or 1
    if split and base.batch_size is not None:
        if size % processes:
            raise DataError(f"split_batches: batch size {size} is not a multiple of the {processes} processes")
        size //= processes
        _set(base, batch_size=size)
        _set(base, batch_sampler=BatchSampler(base.sampler, size, base.drop_last))
    shard = IterableShard(
        base.dataset, batch=size, processes=processes, index=index, drop_last=base.drop_last, even=even
    )
    _set(base, dataset=shard, collate_fn=MarkedCollate(base.collate_fn))


def _make_seedable(base: DataLoader[Any], seed: int | None) -> None:
    """Replace a random sampler in ``base`` by one that depends on a seed and the epoch alone."""
    batch_sampler = base.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        return
    sampler = batch_sampler.sampler
    if type(sampler) is not RandomSampler or sampler.replacement:
        return
    if seed is None:
        seed = collectives.broadcast_object_list([torch.initial_seed() % 2**62])[0]
    seeded = SeedableRandomSampler(sampler.data_source, seed=seed, num_samples=sampler.num_samples)
    _set(base, sampler=seeded, batch_sampler=BatchSampler(seeded, batch_sampler.batch_size, batch_sampler.drop_last))
