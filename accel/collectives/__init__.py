"""Collective operations on nested tensors: gather, reduce, broadcast, and random states.

Nested tensors take as few collectives as possible: gather and broadcast pack every tensor, of any type, into
one buffer of bytes; reduce needs one per data type. Every process must call the same operation with the same
structure, shapes and types. ``ACCELERATE_DEBUG_MODE=1`` checks that first: a mismatch raises
`CollectiveError` on every process, with each process's data, instead of hanging.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from accel.collectives.debug import Leaf, describe, verify
from accel.collectives.flat_buffer import flatten, layout_of, split_flat
from accel.errors import ArgumentError, CollectiveError, LeafError, one_of
from accel.pytree import collect, fields_of, honor_type, is_record, leaves, rebuild_mapping, replace_tensors
from accel.state import PartialState
from accel.world import xla

# torch 2.13 renamed it, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CannotPadNestedTensorWarning(UserWarning):
    """A nested (jagged) tensor was not padded."""


def _tensor_leaves(operation: str, data: Any) -> list[torch.Tensor]:
    tensors: list[Any] = []
    collect(data, tensors)
    for leaf in tensors:
        if not isinstance(leaf, torch.Tensor):
            path = next(path for path, candidate in leaves(data) if candidate is leaf)
            location = f" at {path}" if path else ""
            raise LeafError(
                f"{operation}: {type(leaf).__name__}{location} is not a tensor: use gather_object for objects"
            )
    return tensors


def gather(tensor: Any) -> Any:
    """Return ``tensor`` with each tensor concatenated over all processes along its first dimension, in rank order.

    A tensor of shape ``(n, …)`` becomes ``(n × processes, …)``, one without dimensions ``(processes,)``. One
    collective for all tensors; small tensors of the result may share a storage. Raises `LeafError` for a leaf
    that is no tensor.
    """
    state = PartialState()
    tensors = _tensor_leaves("gather", tensor)
    if not state.use_distributed or not tensors:
        return tensor
    if state.debug:
        verify(state, "gather", data=describe(tensor))
    return replace_tensors(tensor, _gather_tensors(tensors, state))


def _gather_tensors(tensors: list[torch.Tensor], state: PartialState) -> list[torch.Tensor]:
    layout, count = layout_of(tensors), state.num_processes
    if state.backend == xla.BACKEND:
        return [_gather_one(tensor, count, state.device) for tensor in tensors]
    packed = layout.pack(tensors, state.device)
    gathered = packed.new_empty(count * packed.numel())
    _all_gather(gathered, packed)
    return layout.unpack(gathered, count, tensors)


def _gather_one(tensor: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    """Gather one tensor. XLA cannot view a tensor as another type, and fuses collectives itself."""
    local = tensor.detach().to(device)
    local = local.reshape(1) if local.ndim == 0 else local.contiguous()
    gathered = local.new_empty((count * local.shape[0], *local.shape[1:]))
    _all_gather(gathered, local)
    return gathered.to(tensor.device)


def gather_object(object: Any) -> Any:
    """Return the items of every process's list, joined in rank order. In a world of one, return ``object`` itself.

    Raises `LeafError` for an object that is not iterable.
    """
    state = PartialState()
    if not state.use_distributed:
        return object
    joined: list[Any] = []
    for rank, items in enumerate(_all_objects(object, state, "gather_object")):
        if not hasattr(items, "__iter__"):
            raise LeafError(f"gather_object: process {rank} passed a {type(items).__name__}: pass a list of objects")
        joined.extend(items)
    return joined


def all_objects(value: Any) -> list[Any]:
    """Return the picklable ``value`` of every process, in rank order."""
    state = PartialState()
    return _all_objects(value, state, "all_objects") if state.use_distributed else [value]


def _all_objects(value: Any, state: PartialState, operation: str) -> list[Any]:
    if state.debug:
        verify(state, operation)
    gathered: list[Any] = [None] * state.num_processes
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy every tensor in ``tensor`` from process ``from_process`` to all, in place; return ``tensor``.

    One collective for all tensors.
    """
    state = PartialState()
    tensors = _tensor_leaves("broadcast", tensor)
    if not state.use_distributed or not tensors:
        return tensor
    if state.debug:
        verify(state, "broadcast", f"from_process={from_process}", describe(tensor))
    if state.backend == xla.BACKEND:
        for leaf in tensors:
            device_copy = leaf.detach().to(state.device)
            dist.broadcast(device_copy, src=from_process)
            with torch.no_grad():
                leaf.copy_(device_copy)
        return tensor
    layout = layout_of(tensors)
    packed = layout.pack(tensors, state.device)
    dist.broadcast(packed, src=from_process)
    with torch.no_grad():
        torch._foreach_copy_(tensors, layout.unpack_one(packed, tensors))
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of ``object_list``, in place, by those on process ``from_process``; lengths must be equal."""
    state = PartialState()
    if state.use_distributed:
        if state.debug:
            verify(state, "broadcast_object_list", f"{len(object_list)} object(s) from_process={from_process}")
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return ``tensor`` with each tensor reduced over all processes, times ``scale``; the originals are unchanged.

    ``reduction`` is ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which only scales. One collective per data
    type. Integers stay integers under ``"sum"`` and ``"max"`` and become floating point under ``"mean"``. Raises
    `CollectiveError` for booleans and for the maximum of complex numbers, and `LeafError` for leaves that are no
    tensors.
    """
    kind = one_of(reduction, ("sum", "mean", "max", "none"), source="reduction")
    state = PartialState()
    tensors = _tensor_leaves("reduce", tensor)
    if kind == "none" or not state.use_distributed or not tensors:
        scaled = [leaf.clone() if scale == 1.0 else leaf * scale for leaf in tensors]
        return replace_tensors(tensor, scaled)
    if state.debug:
        verify(state, "reduce", f"reduction={kind!r}", describe(tensor))
    return replace_tensors(tensor, _combine(tensors, kind, scale, state))


def _combine(tensors: list[torch.Tensor], kind: str, scale: float, state: PartialState) -> list[torch.Tensor]:
    by_type: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype is torch.bool:
            raise CollectiveError(f"reduce: a boolean tensor has no {kind}: convert it, for instance with .int()")
        if kind == "max" and tensor.is_complex():
            raise CollectiveError("reduce: complex numbers have no order, hence no max")
        by_type.setdefault(tensor.dtype, []).append(index)
    combined: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for indices in by_type.values():
            same_type = [tensors[index] for index in indices]
            combined.update(zip(indices, _combine_same_dtype(same_type, kind, scale, state), strict=True))
    return [combined[index] for index in range(len(tensors))]


def _combine_same_dtype(
    tensors: list[torch.Tensor], kind: str, scale: float, state: PartialState
) -> list[torch.Tensor]:
    on_device = [tensor.to(state.device) for tensor in tensors]
    flat = flatten(on_device) if len(on_device) > 1 else on_device[0].flatten().clone()
    # Complex numbers are summed as pairs of reals, which every backend supports.
    dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, _REDUCE_OPS[kind])
    if kind == "mean":
        flat = flat / state.num_processes
    if scale != 1.0:
        flat = flat * scale
    return [piece.to(tensor.device) for piece, tensor in zip(split_flat(flat, tensors), tensors, strict=True)]


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return ``tensor`` with each tensor padded with ``pad_index`` along ``dim`` to the largest size of any process.

    Padding follows the data, or precedes it with ``pad_first``. Tensors without dimension ``dim``, and those of equal
    size everywhere, are returned unchanged. One small collective for all tensors. Jagged tensors are returned
    unchanged, with a `CannotPadNestedTensorWarning`.
    """
    state = PartialState()
    tensors = _tensor_leaves("pad_across_processes", tensor)
    if any(leaf.is_nested for leaf in tensors):
        warnings.warn("nested tensors cannot be padded: returned unchanged", CannotPadNestedTensorWarning, stacklevel=2)
    if not state.use_distributed or not tensors:
        return tensor
    if state.debug:
        verify(state, "pad_across_processes", f"dim={dim}", [_without_sizes(leaf) for leaf in describe(tensor)])
    sizes = torch.tensor([_size_along(leaf, dim) for leaf in tensors], device=state.device)
    all_sizes = sizes.new_empty(state.num_processes * len(tensors))
    _all_gather(all_sizes, sizes)
    largest: list[int] = all_sizes.view(state.num_processes, -1).amax(0).tolist()
    padded = [_pad(leaf, size, dim, pad_index, pad_first) for leaf, size in zip(tensors, largest, strict=True)]
    return replace_tensors(tensor, padded)


def _without_sizes(leaf: Leaf) -> Leaf:
    return leaf._replace(shape=(-1,) * len(leaf.shape))


def _size_along(tensor: torch.Tensor, dim: int) -> int:
    if tensor.is_nested:
        return -1
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else -1


def _pad(tensor: torch.Tensor, size: int, dim: int, value: float, first: bool) -> torch.Tensor:
    if size < 0 or tensor.is_nested or tensor.shape[dim] == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    filling = tensor.new_full(shape, value)
    return torch.cat([filling, tensor] if first else [tensor, filling], dim=dim)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested tensors of one structure, each tensor along ``dim``.

    Mappings are joined by key. Leaves that are no tensors raise `LeafError`, except in a sequence of one.
    """
    if not data:
        raise ArgumentError("concatenate: nothing to join")
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate(column, dim) for column in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if is_record(first):
        names = [name for name, _ in fields_of(first)]
        return replace(first, **{n: concatenate([getattr(item, n) for item in data], dim) for n in names})
    if len(data) == 1:
        return first
    raise LeafError(f"concatenate: {type(first).__name__} is not a tensor")


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype]:
    """Return shape and type of the tensor that one process passes; the others pass ``None``.

    Raises `CollectiveError` if none or several pass one.
    """
    _, shape, dtype = _single_holder(tensor)
    return shape, dtype


def _single_holder(tensor: torch.Tensor | None) -> tuple[int, torch.Size, torch.dtype]:
    descriptions = all_objects(None if tensor is None else (tensor.shape, tensor.dtype))
    holders = [rank for rank, value in enumerate(descriptions) if value is not None]
    if len(holders) != 1:
        raise CollectiveError(f"one process must have a tensor and the others None, but {holders or 'none'} have one")
    shape, dtype = descriptions[holders[0]]
    return holders[0], shape, dtype


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return, on every process's device, the tensor that one process passes; the others pass ``None``.

    Raises `CollectiveError` if none or several pass one.
    """
    source, shape, dtype = _single_holder(tensor)
    device = PartialState().device
    local = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.detach().to(device, copy=True)
    received: torch.Tensor = broadcast(local, source)
    return received


def wait_for_everyone() -> None:
    """Wait until every process has called this."""
    PartialState().wait_for_everyone()
