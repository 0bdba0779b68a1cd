"""`prepare_data_loader`, which limits a script's loader to this process's share, and `skip_first_batches`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accel import collectives
from accel.data.batch_sampler import (
    SkipBatchSampler,
    batch_size_per_rank,
    is_datasets_stream,
    is_presharded,
    shares_by_rank,
)
from accel.data.dispatcher import DataLoaderDispatcher
from accel.data.iterable import IterableDatasetShard, collate_last_round
from accel.data.loader import DataLoaderShard, PreparedLoader
from accel.data.shuffle import SeedableRandomSampler, is_plain
from accel.data.torch_loader import set_attributes, share_sampler
from accel.enums import RNGType
from accel.errors import ArgumentError, DataError
from accel.state import PartialState


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[RNGType | str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    already_sharded: bool = False,
    copies: int = 1,
) -> PreparedLoader:
    """Return a loader of the share of ``dataloader`` for process ``process_index`` of ``num_processes``.

    ``dataloader`` itself is not changed and all its settings are kept. A prepared loader is returned unchanged,
    and one that is this process's share already (``already_sharded``, or see `is_presharded`) is not sharded
    again.

    ``put_on_device``: move batches to ``device``.
    ``rng_types``: the generators to synchronize when an epoch begins: by default (``["generator"]``) those that
        draw the order.
    ``dispatch_batches``: the main process reads for all; ``None``: if the data set is iterable and batches are
        moved to the device.
    ``torch_device_mesh``: processes that differ only in dimensions other than ``dp``, ``dp_replicate``,
        ``dp_shard`` and ``fsdp`` see the same data.
    ``copies``: the number of processes with each share; all of them must call this function.

    For the other arguments see `DataLoaderConfiguration`. Raises `DataError` for a loader that cannot be sharded
    like this.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    world = PartialState()
    shares = shares_by_rank(torch_device_mesh, world.num_processes)
    processes = max(shares) + 1 if num_processes is None else num_processes
    index = shares[world.process_index] if process_index is None else process_index
    kinds = [str(kind) for kind in (["generator"] if rng_types is None else rng_types)]
    presharded = already_sharded or is_presharded(dataloader)
    several = processes * copies > 1
    shared = "generator" in kinds and several and not presharded
    base = copy.copy(dataloader)
    if use_seedable_sampler:
        _make_seedable(base, data_seed, distributed=several)
    kwargs: dict[str, Any] = {
        "device": device if put_on_device else None,
        "non_blocking": non_blocking,
        "rng_types": [kind for kind in kinds if kind != "generator"],
        "processes": processes,
        "index": index,
        "resumes": use_stateful_dataloader,
    }
    if _dispatches(base, dispatch_batches, processes, presharded, put_on_device, torch_device_mesh):
        batches = None if isinstance(base.dataset, IterableDataset) else share_sampler(base)
        return DataLoaderDispatcher.wrap(
            base, batches, split=split_batches, even=even_batches, slice_fn=slice_fn_for_dispatch,
            mesh=torch_device_mesh, drop_last=base.drop_last or getattr(base.batch_sampler, "drop_last", False),
            **kwargs,
        )  # fmt: skip
    if isinstance(base.dataset, IterableDataset):
        _share_stream(base, 1 if presharded else processes, index, split_batches, even_batches)
        return DataLoaderShard.wrap(base, None, shared=shared, **kwargs)
    batches = share_sampler(
        base, num_processes=processes, process_index=index, split_batches=split_batches, even_batches=even_batches,
        shared="generator" in kinds, copies=copies, own_share=presharded,
    )  # fmt: skip
    return DataLoaderShard.wrap(base, batches, **kwargs)


def _dispatches(
    base: DataLoader[Any], requested: bool | None, processes: int, presharded: bool, put_on_device: bool, mesh: Any
) -> bool:
    if presharded:
        if not requested:
            return False
        raise DataError(
            "dispatch_batches=True makes the main process read for all, but this loader is one process's share: "
            "remove dispatch_batches, or pass a loader of the complete data set"
        )
    if processes == 1:
        return bool(requested) and PartialState().num_processes == 1
    if requested is None:
        requested = put_on_device and isinstance(base.dataset, IterableDataset)
    world = PartialState().num_processes
    if requested and mesh is None and processes != world:
        if world == 1:
            return False  # a share of a simulated world, as in a dry run: there is no sender
        raise DataError(f"dispatch_batches=True reads for all {world} processes of the world, not for {processes}")
    return requested


def _share_stream(base: DataLoader[Any], processes: int, index: int, split: bool, even: bool) -> None:
    if processes == 1:
        return
    dataset: Any = base.dataset
    if is_datasets_stream(dataset) and not split and dataset.num_shards >= processes:
        set_attributes(base, dataset=dataset.shard(num_shards=processes, index=index))
        return
    size = base.batch_size or 1
    shard = IterableDatasetShard(
        dataset, size, base.drop_last, processes, index, split and base.batch_size is not None,
        even_batches=even, marks=True,
    )  # fmt: skip
    if shard.split_batches:
        size = batch_size_per_rank(size, processes)
        set_attributes(base, batch_size=size, batch_sampler=BatchSampler(base.sampler, size, base.drop_last))
    set_attributes(base, dataset=shard, collate_fn=partial(collate_last_round, base.collate_fn))


def _make_seedable(base: DataLoader[Any], seed: int | None, distributed: bool) -> None:
    """Replace a random sampler in ``base`` by one that depends on a seed and the epoch alone."""
    batch_sampler: Any = base.batch_sampler
    if not is_plain(batch_sampler, BatchSampler) or not is_plain(batch_sampler.sampler, RandomSampler):
        return
    if seed is None:
        seed = torch.initial_seed() % 2**62
        if distributed:
            seed = collectives.broadcast_object_list([seed])[0]
    sampler = batch_sampler.sampler
    seeded = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=seed
    )
    set_attributes(
        base, sampler=seeded, batch_sampler=BatchSampler(seeded, batch_sampler.batch_size, batch_sampler.drop_last)
    )


# Skipping the first batches of a loader.


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
    if num_batches < 0:
        raise ArgumentError(f"skip_first_batches: num_batches must be 0 or more, got {num_batches}")
    skipping = getattr(dataloader, "skipping", None)  # of a prepared loader
    if skipping is not None:
        return cast("DataLoader[Any]", skipping(num_batches))
    base = copy.copy(dataloader)
    if isinstance(base.dataset, IterableDataset):
        return DataLoaderShard.wrap(base, None, skip_batches=num_batches)
    share_sampler(base, SkipBatchSampler, skip_batches=num_batches)
    return base
