"""Collective operations on nested tensors: gather, reduce, broadcast, and random states.

Nested tensors take as few collectives as possible: gather and broadcast pack every tensor, of any type, into
one buffer of bytes; reduce needs one per data type. Every process must call the same operation with the same
structure, shapes and types. ``ACCELERATE_DEBUG_MODE=1`` checks that first: a mismatch raises
`CollectiveError` on every process, with each process's data, instead of hanging.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel.collectives.debug import verify
from accel.collectives.flat_buffer import first_elements, layout_of
from accel.errors import ArgumentError, CollectiveError, LeafError, one_of
from accel.pytree import children, collect, leaves, rebuild, replace_tensors
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
    verify(state, "gather", data=tensor)
    return replace_tensors(tensor, _gather_tensors(tensors, state))


def _gather_tensors(tensors: list[torch.Tensor], state: PartialState) -> list[torch.Tensor]:
    count = state.num_processes
    if state.backend == xla.BACKEND:
        return [_gather_one(tensor, count, state.device) for tensor in tensors]
    layout = layout_of(tensors, count)
    packed = layout.pack(tensors, state.device)
    gathered = packed.new_empty(count * packed.numel())
    _all_gather(gathered, packed)
    layout.check(gathered)
    return layout.unpack(gathered, tensors)


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
    if not PartialState().use_distributed:
        return object
    joined: list[Any] = []
    for rank, items in enumerate(all_objects(object, "gather_object")):
        if not hasattr(items, "__iter__"):
            raise LeafError(f"gather_object: process {rank} passed a {type(items).__name__}: pass a list of objects")
        joined.extend(items)
    return joined


def all_objects(value: Any, operation: str = "all_objects", group: Any = None) -> list[Any]:
    """Return the picklable ``value`` of every process, in rank order.

    ``operation``: its name in debug mode. ``group``: a process group of all processes, by default the world's.
    """
    state = PartialState()
    if not state.use_distributed:
        return [value]
    if group is None:
        verify(state, operation)
    gathered: list[Any] = [None] * state.num_processes
    dist.all_gather_object(gathered, value, group)
    return gathered


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy every tensor in ``tensor`` from process ``from_process`` to all, in place; return ``tensor``.

    One collective for all tensors.
    """
    state = PartialState()
    tensors = _tensor_leaves("broadcast", tensor)
    if not state.use_distributed or not tensors:
        return tensor
    verify(state, "broadcast", f"from_process={from_process}", tensor)
    if state.backend == xla.BACKEND:
        received = [leaf.detach().to(state.device) for leaf in tensors]
        for device_copy in received:
            dist.broadcast(device_copy, src=from_process)
    else:
        layout = layout_of(tensors)
        packed = layout.pack(tensors, state.device)
        dist.broadcast(packed, src=from_process)
        layout.check(packed)
        received = layout.split(packed)
    with torch.no_grad():
        for leaf, value in zip(tensors, received, strict=True):
            first_elements(leaf, leaf).copy_(first_elements(value, leaf))
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of ``object_list``, in place, by those on process ``from_process``; lengths must be equal."""
    state = PartialState()
    if state.use_distributed:
        verify(state, "broadcast_object_list", f"{len(object_list)} object(s) from_process={from_process}")
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return ``tensor`` with each tensor reduced over all processes, times ``scale``; the originals are unchanged.

    ``reduction`` is ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which only scales. One collective per data
    type. Integers stay integers under ``"sum"`` and ``"max"`` and become floating point under ``"mean"``, for which
    16-bit floats are summed in fp32. Raises `CollectiveError` for booleans and for the maximum of complex numbers, and
    `LeafError` for leaves that are no tensors.
    """
    kind = one_of(reduction, ("sum", "mean", "max", "none"), source="reduction")
    state = PartialState()
    tensors = _tensor_leaves("reduce", tensor)
    if kind == "none" or not state.use_distributed or not tensors:
        scaled = [leaf.clone() if scale == 1.0 else leaf * scale for leaf in tensors]
        return replace_tensors(tensor, scaled)
    verify(state, "reduce", f"reduction={kind!r}", tensor)
    return replace_tensors(tensor, _combine(tensors, kind, scale, state))


def _combine(tensors: list[torch.Tensor], kind: str, scale: float, state: PartialState) -> list[torch.Tensor]:
    by_type: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype is torch.bool:
            raise CollectiveError(f"reduce: a boolean tensor has no {kind}: convert it, for instance with .int()")
        if kind == "max" and tensor.is_complex():
            raise CollectiveError("reduce: complex numbers have no order, hence no max")
        # The sum of 16-bit floats may overflow where their mean does not.
        widened = kind == "mean" and tensor.is_floating_point() and tensor.itemsize < 4
        by_type.setdefault(torch.float32 if widened else tensor.dtype, []).append(index)
    combined: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for dtype, indices in by_type.items():
            operands = [tensors[index].to(state.device, dtype).reshape(-1) for index in indices]
            flat = torch.cat(operands)
            # Complex numbers are summed as pairs of reals, which every backend supports.
            dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, _REDUCE_OPS[kind])
            if kind == "mean":
                flat = flat / state.num_processes
            if scale != 1.0:
                flat = flat * scale
            for index, piece in zip(indices, torch.split(flat, [len(part) for part in operands]), strict=True):
                original = tensors[index]
                piece = piece.to(original.device, piece.dtype if original.dtype is dtype else original.dtype)
                combined[index] = piece.view(original.shape)
    return [combined[index] for index in range(len(tensors))]


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
    verify(state, "pad_across_processes", f"dim={dim}", tensor, sizes=False)
    sizes = sizes_by_process(tensors, dim)
    padded = [_pad(leaf, max(every), dim, pad_index, pad_first) for leaf, every in zip(tensors, sizes, strict=True)]
    return replace_tensors(tensor, padded)


def sizes_by_process(tensors: list[torch.Tensor], dim: int = 0) -> list[list[int]]:
    """Return, for each of ``tensors``, its size along ``dim`` on every process; -1 where it has no such dimension."""
    state = PartialState()
    sizes = torch.tensor([_size_along(leaf, dim) for leaf in tensors], device=state.device)
    all_sizes = sizes.new_empty(state.num_processes * len(tensors))
    _all_gather(all_sizes, sizes)
    columns: list[list[int]] = all_sizes.view(state.num_processes, -1).t().tolist()
    return columns


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
    items = children(first)
    if items is not None:
        parts: list[Any] = [children(item) for item in data]
        return rebuild(first, {key: concatenate([part[key] for part in parts], dim) for key in items})
    if len(data) == 1:
        return first
    raise LeafError(f"concatenate: {type(first).__name__} is not a tensor")


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype]:
    """Return shape and type of the tensor that one process passes; the others pass ``None``.

    Raises `CollectiveError` if none or several pass one.
    """
    return _single_holder(tensor)[1:]


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
