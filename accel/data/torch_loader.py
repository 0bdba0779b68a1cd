"""Parts of prepared loaders: creating and changing torch's loaders, reading ahead, moving batches to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel.data.batch_sampler import BatchSamplerShard
from accel.errors import ArgumentError
from accel.pytree import send_to_device
from accel.state import GradientState, PartialState
from accel.world import xla


def set_attributes(loader: DataLoader[Any], **attributes: Any) -> None:
    """Set attributes of a loader that is not being iterated.

    `DataLoader` forbids this after construction, because a running iterator would not see it; ``loader`` must be
    a fresh copy.
    """
    vars(loader).update(attributes)


@contextmanager
def preserve_rng(base: DataLoader[Any]) -> Iterator[None]:
    """Draw the seed of ``base``'s workers in the block without advancing the generator that it comes from."""
    original = base.generator
    scratch = torch.Generator()
    scratch.set_state(torch.get_rng_state() if original is None else original.get_state())
    set_attributes(base, generator=scratch)
    try:
        yield
    finally:
        set_attributes(base, generator=original)


def make_loader(
    dataset: Any, stateful: bool, options: dict[str, Any]
) -> tuple[DataLoader[Any], BatchSamplerShard | None]:
    """Return torch's or (``stateful``) torchdata's loader and its batch sampler, ``None`` for iterable data sets."""
    sharded = options.get("batch_sampler")
    base = loader_class(stateful)(dataset, **options)
    if isinstance(dataset, IterableDataset):
        return base, None
    if isinstance(sharded, BatchSamplerShard):
        return base, sharded
    return base, share_sampler(base)


def share_sampler(base: DataLoader[Any], **kwargs: Any) -> BatchSamplerShard:
    """Replace the batch sampler of ``base`` by a `BatchSamplerShard`, and return that."""
    if base.batch_sampler is None:
        batches = BatchSamplerShard(base.sampler, **kwargs)
        set_attributes(base, sampler=batches)
    else:
        batches = BatchSamplerShard(base.batch_sampler, **kwargs)
        set_attributes(base, batch_sampler=batches)
    return batches


def loader_class(stateful: bool) -> type[DataLoader[Any]]:
    """Return torch's `DataLoader` or torchdata's `StatefulDataLoader`. Raises `ArgumentError` without torchdata."""
    if not stateful:
        return DataLoader
    try:
        stateful_class: type[DataLoader[Any]] = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError:
        raise ArgumentError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'") from None
    return stateful_class


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
    cls: Any = stateful_kind(kind) if stateful else kind
    loader: DataLoader[Any] = cls.__new__(cls)
    return loader


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler inside ``dataloader``, prepared or not; ``None`` if its batch sampler has none."""
    batch_sampler = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(batch_sampler, "sampler", None)


# Reading ahead, only as far as the end of an accumulation window must be known.


def window_depth(state: GradientState) -> int:
    """Return the number of batches to buffer so that a window cut short by the end is known at its first batch."""
    plugin = state.plugin
    return max(1, plugin.num_steps - 1) if plugin.sync_with_dataloader else 1


class Lookahead(Iterator[Any]):
    """An iterator over ``source`` that buffers ``depth()`` items after the current one.

    ``snapshot`` is called after each item is read; `snapshot_here` is its result for the current item, the state
    from which to resume after it.
    """

    def __init__(
        self, source: Iterator[Any], depth: Callable[[], int], snapshot: Callable[[], Any] | None = None
    ) -> None:
        self._source = source
        self._depth = depth
        self._snapshot = snapshot
        self._buffer: deque[tuple[Any, Any]] = deque()
        self.exhausted = False
        self.snapshot_here: Any = None

    def fill(self) -> None:
        """Read until the buffer is full or the source ends."""
        depth = self._depth()
        while not self.exhausted and len(self._buffer) < depth:
            self._read()

    def _read(self) -> None:
        try:
            item = next(self._source)
        except StopIteration:
            self.exhausted = True
            return
        self._buffer.append((item, None if self._snapshot is None else self._snapshot()))

    def peek(self) -> Any:
        """Return the next item, or ``None`` if there is none."""
        return self._buffer[0][0] if self._buffer else None

    def __len__(self) -> int:
        return len(self._buffer)

    def __next__(self) -> Any:
        if not self._buffer:
            self.fill()
            if not self._buffer:
                raise StopIteration
        item, self.snapshot_here = self._buffer.popleft()
        self.fill()
        return item


# Moving batches to a device, at little more than the cost of torch's own calls.


def to_device_fn(device: torch.device, non_blocking: bool) -> Callable[[Any], Any]:
    """Return `send_to_device` for one device, with a fast path for tensors and for dicts and lists of them."""

    def move(batch: Any) -> Any:
        kind = type(batch)
        if kind is Tensor:
            return batch.to(device)
        if kind is dict:
            return {key: item.to(device) if type(item) is Tensor else move(item) for key, item in batch.items()}
        if kind is list:
            return [item.to(device) if type(item) is Tensor else move(item) for item in batch]
        return send_to_device(batch, device)

    if PartialState._shared_state.get("backend") == xla.BACKEND:
        return _SyncedMove(move)
    return partial(send_to_device, device=device, non_blocking=True) if non_blocking else move


class _SyncedMove:
    """A move that first ends torch_xla's recording of the previous batch: one graph per step, not one per epoch."""

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move

    def __call__(self, batch: Any) -> Any:
        xla.sync()
        return self._move(batch)
