"""Creating a model with its parameters on another device from the start, mainly the meta device."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from accel.big_models.devices import Device, as_device
from accel.big_models.module_tensors import like_parameter
from accel.world.environment import read_flag


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of modules in the block on the meta device: shapes and types, no memory.

    ``include_buffers`` puts buffers, and every other tensor created in the block, there too; its default is the
    environment variable ``ACCELERATE_INIT_INCLUDE_BUFFERS``, or no. A shared parameter stays shared. Other
    threads are not affected.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of modules in the block on ``device``; see `init_empty_weights`."""
    if include_buffers is None:
        include_buffers = read_flag(os.environ, "ACCELERATE_INIT_INCLUDE_BUFFERS")
    target = as_device(device)
    if include_buffers:
        with target:
            yield
        return
    with _activate(_Placement(target)):
        yield


class _Placement:
    """A function that moves parameters to one device, each once, however many modules share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved_parameters: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def __call__(self, param: nn.Parameter) -> nn.Parameter:
        if is_lazy(param) or param.device == self._device:
            return param
        cached = self._moved_parameters.get(id(param))
        if cached is not None and cached[0]() is param:
            return cached[1]
        replacement = like_parameter(param, param.detach().to(self._device))
        self._moved_parameters[id(param)] = (weakref.ref(param), replacement)
        return replacement


class _Placements(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Placement] = []


# torch's registration hooks apply to all threads: one is registered while any thread is in such a block, and it
# does nothing in other threads.
_placements = _Placements()
_lock = threading.Lock()
_inside = 0
_handle: RemovableHandle | None = None


def _on_registration(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or not _placements.stack:
        return None
    return _placements.stack[-1](param)


@contextmanager
def _activate(placement: _Placement) -> Iterator[None]:
    global _inside, _handle
    with _lock:
        _inside += 1
        if _handle is None:
            _handle = register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]
    _placements.stack.append(placement)
    try:
        yield
    finally:
        _placements.stack.remove(placement)
        with _lock:
            _inside -= 1
            if not _inside and _handle is not None:
                _handle.remove()
                _handle = None
