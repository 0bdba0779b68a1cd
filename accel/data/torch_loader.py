"""Parts of prepared loaders: creating and changing torch's loaders, reading ahead, moving batches to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from accel.data.batch_sampler import BatchSamplerShard, SkipBatchSampler
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
    """Return torch's or (``stateful``) torchdata's loader and its batch sampler, ``None`` for iterable data sets.

    Raises `ArgumentError` without torchdata.
    """
    kind: Any = DataLoader
    if stateful:
        try:
            kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        except ImportError:
            raise ArgumentError("use_stateful_dataloader=True needs torchdata: pip install 'torchdata>=0.8'") from None
    sharded = options.get("batch_sampler")
    base = kind(dataset, **options)
    if isinstance(dataset, IterableDataset):
        return base, None
    ready = isinstance(sharded, BatchSamplerShard) and not isinstance(sharded, SkipBatchSampler)
    return base, sharded if ready else share_sampler(base)


def share_sampler(
    base: DataLoader[Any], kind: type[BatchSamplerShard] = BatchSamplerShard, **kwargs: Any
) -> BatchSamplerShard:
    """Replace the batch sampler of ``base`` by a ``kind`` around it, and return that."""
    name = "sampler" if base.batch_sampler is None else "batch_sampler"
    batches = kind(getattr(base, name), **kwargs)
    set_attributes(base, **{name: batches})
    return batches


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
        while not self.exhausted and len(self._buffer) < self._depth():
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

    def move_after_sync(batch: Any) -> Any:
        xla.sync()  # ends torch_xla's recording of the previous batch: one graph per step, not one per epoch
        return move(batch)

    if PartialState._shared_state.get("backend") == xla.BACKEND:
        return move_after_sync
    return partial(send_to_device, device=device, non_blocking=True) if non_blocking else move
