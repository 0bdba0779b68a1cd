"""Creating and changing torch's loaders, which prepared loaders wrap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel.data.batch_sampler import BatchSamplerShard
from accel.errors import ArgumentError


def alter(loader: DataLoader[Any], **attributes: Any) -> None:
    """Set attributes of a loader that is not being iterated.

    `DataLoader` forbids this after construction, because a running iterator would not see it; ``loader`` must be
    a fresh copy.
    """
    vars(loader).update(attributes)


@contextmanager
def seeding_aside(base: DataLoader[Any]) -> Iterator[None]:
    """Draw the seed of ``base``'s workers in the block without advancing the generator that it comes from."""
    own = base.generator
    aside = torch.Generator()
    aside.set_state(torch.get_rng_state() if own is None else own.get_state())
    alter(base, generator=aside)
    try:
        yield
    finally:
        alter(base, generator=own)


def make_loader(
    dataset: Any, stateful: bool, options: dict[str, Any]
) -> tuple[DataLoader[Any], BatchSamplerShard | None]:
    """Return torch's loader, or with ``stateful`` torchdata's, and its batch sampler; ``None`` for a stream."""
    sharded = options.get("batch_sampler")
    base = loader_class(stateful)(dataset, **options)
    if isinstance(dataset, IterableDataset):
        return base, None
    if isinstance(sharded, BatchSamplerShard):
        return base, sharded
    return base, share_sampler(base)


def share_sampler(base: DataLoader[Any], **how: Any) -> BatchSamplerShard:
    """Replace the batch sampler of ``base`` by a `BatchSamplerShard`, and return that."""
    if base.batch_sampler is None:
        batches = BatchSamplerShard(base.sampler, **how)
        alter(base, sampler=batches)
    else:
        batches = BatchSamplerShard(base.batch_sampler, **how)
        alter(base, batch_sampler=batches)
    return batches


def loader_class(stateful: bool) -> type[DataLoader[Any]]:
    """Return torch's `DataLoader` or torchdata's `StatefulDataLoader`. Raises `ArgumentError` without torchdata."""
    if not stateful:
        return DataLoader
    try:
        found: type[DataLoader[Any]] = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError:
        raise ArgumentError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'") from None
    return found


@cache
def stateful_kind(kind: Any) -> Any:
    """Return ``kind`` as a subclass of `StatefulDataLoader` too; unchanged without torchdata."""
    try:
        base = loader_class(True)
    except ArgumentError:
        return kind
    if issubclass(kind, base):
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "plain_kind": kind}
    return type(kind.__name__, (kind, base), names)


def blank(kind: Any, stateful: bool) -> DataLoader[Any]:
    """Return a loader without state, for unpickling."""
    made: Any = stateful_kind(kind) if stateful else kind
    loader: DataLoader[Any] = made.__new__(made)
    return loader


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler inside ``dataloader``, prepared or not; ``None`` if its batch sampler has none."""
    outer = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(outer, "sampler", None)
