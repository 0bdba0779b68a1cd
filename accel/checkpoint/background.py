"""A background thread that saves during training, and the copy of the run's state in host memory that it saves."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch

from accel.checkpoint.files import identity
from accel.host_memory import HostMemory
from accel.logging import get_logger
from accel.pytree import tensors

logger = get_logger(__name__)

# The copy.

_PIECE = 2 << 20  # elements
_ALIGNMENT = 64
_COPIERS = 4


class Staging:
    """A reusable buffer of host memory, for one copy of tensors on ``device`` at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = HostMemory(0, device)

    def copy(self, value: Any) -> Any:
        """Copy ``value``, a nested container, with all tensors and other mutable objects in it.

        Tensors that share memory still do. The previous copy is overwritten.
        """
        originals = tensors(value)
        plain = {identity(tensor): tensor for tensor in originals if _is_plain(tensor)}
        sizes = [tensor.numel() * tensor.element_size() for tensor in plain.values()]
        *offsets, end = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        if end > self._memory.bytes.numel():
            self._memory.free()
            self._memory = HostMemory(end, self._device)
        copies: dict[Any, torch.Tensor] = {}
        for offset, (key, tensor) in zip(offsets, plain.items(), strict=True):
            # Each tensor has its own storage: `torch.save` writes complete storages.
            memory = self._memory.bytes[offset:].numpy()
            copies[key] = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
        _fill([(copies[key], tensor) for key, tensor in plain.items()])
        by_id = {id(item): copies[identity(item)] if _is_plain(item) else _copy_of_other(item) for item in originals}
        return copy.deepcopy(value, by_id)

    def free(self) -> None:
        """Release the buffer; copies that are still referenced keep theirs."""
        self._memory.free()


def _is_plain(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    return strided and not tensor.is_meta and tensor.numel() > 0


def _copy_of_other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.detach().clone().cpu()


def _fill(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first tensor of each pair the second; threads share the page faults of those on the host."""
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        if source.device.type == "cpu" and source.is_contiguous():
            pieces += zip(
                torch.split(target.view(-1), _PIECE), torch.split(source.detach().view(-1), _PIECE), strict=True
            )
        else:
            target.copy_(source.detach(), non_blocking=True)
    with ThreadPoolExecutor(min(_COPIERS, os.cpu_count() or 1), "accel-copy") as pool:
        list(pool.map(lambda piece: piece[0].copy_(piece[1]), pieces))
    for device in {source.device for _, source in pairs}:
        if device.type in ("cuda", "xpu"):
            getattr(torch, device.type).synchronize(device)


# The thread.


class Background:
    """A runner of one task at a time. An exception is logged at once and raised by `wait`.

    The thread is not a daemon, so the interpreter does not exit before the task is done.
    """

    def __init__(self) -> None:
        self._task: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work`` in a thread. No other task may be running: call `wait` first."""
        task = self._task = Future[None]()

        def run() -> None:
            try:
                work()
                task.set_result(None)
            except BaseException as error:  # else `wait` would never return
                logger.error(str(error), main_process_only=False)
                task.set_exception(error)

        threading.Thread(target=run, name="accel-checkpoint").start()

    def wait(self) -> None:
        """Wait until no task is running. Raises the task's error, once."""
        task, self._task = self._task, None
        if task is not None:
            task.result()
