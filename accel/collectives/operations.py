"""Utilities for nested tensors, with Accelerate's names.

Unlike Accelerate's functions, these also recurse into dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accel.errors import ArgumentError, LeafError
from accel.pytree import children, map_nested, rebuild, tensors


@dataclass
class TensorInformation:
    """The shape and type of a tensor, enough to create an empty one."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Return True if ``tensor`` is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return True if ``tensor_info`` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace each leaf of ``data`` for which ``test_type`` is true by ``func(leaf, *args, **kwargs)``.

    Other leaves stay; with ``error_on_other_type`` they raise `LeafError`.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            test_name, name = getattr(test_type, "__name__", "test_type"), getattr(func, "__name__", "the function")
            raise LeafError(f"{name}: a leaf of type {type(leaf).__name__} does not satisfy {test_name}")
        return leaf

    return apply(data) if test_type(data) else map_nested(apply, data)


def get_data_structure(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by a `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return ``data_structure`` with each `TensorInformation` replaced by an uninitialized tensor."""
    # Checked first: a `TensorInformation` is a dataclass, which is otherwise a nest.
    if is_tensor_information(data_structure):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    items = children(data_structure)
    if items is None:
        return data_structure
    return rebuild(data_structure, {key: initialize_tensors(item) for key, item in items.items()})


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first tensor in ``data``.

    Raises `ArgumentError` for an empty structure and for a tensor without dimensions, `LeafError` if the first
    leaf is not a tensor.
    """
    leaf = data
    while not isinstance(leaf, torch.Tensor):
        items = children(leaf)
        if items is None:
            raise LeafError(f"find_batch_size: a {type(leaf).__name__} comes first, which is not a tensor")
        if not items:
            raise ArgumentError(f"find_batch_size: an empty {type(leaf).__name__} has no batch size")
        leaf = next(iter(items.values()))
    if leaf.ndim == 0:
        raise ArgumentError("find_batch_size: a tensor without dimensions has no batch size")
    return leaf.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Like `find_batch_size`, but return ``None`` instead of raising."""
    try:
        return find_batch_size(data)
    except (ArgumentError, LeafError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in ``data``, or ``None``."""
    leaves = tensors(data)
    return leaves[0].device if leaves else None


def listify(data: Any) -> Any:
    """Return ``data`` with each tensor replaced by nested lists of its numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad each tensor of ``batch_size`` rows in ``tensor`` with zeros along ``dim``.

    The result has a multiple of ``num_processes`` rows, so that all processes get equally many.
    """
    missing = -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)
