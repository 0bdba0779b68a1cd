"""What all processes do together on nests of tensors.

A nest travels in as few collective operations as its contents allow: gather and broadcast pack every tensor, of
whatever type, into one buffer of bytes; reduce needs one a data type. Every process must come with
the same structure, shapes and types; with ``ACCELERATE_DEBUG_MODE=1`` that is checked first, and a disagreement raises
`CollectiveError` naming the processes instead of hanging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from accel.errors import ArgumentError, CollectiveError, one_of
from accel.nested import leaves, map_nested, replace_tensors
from accel.packing import pack, unpack
from accel.state import PartialState

# torch 2.13 renamed it and warns at the old name, which is the only one until then.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def _describe(data: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for path, leaf in leaves(data)
        if isinstance(leaf, torch.Tensor)
    ]


def _verify(operation: str, data: Any) -> None:
    """Raise `CollectiveError` on every process if the tensors in ``data`` are not alike everywhere."""
    seen: list[Any] = [None] * PartialState().num_processes
    dist.all_gather_object(seen, _describe(data))
    if all(description == seen[0] for description in seen):
        return
    raise CollectiveError(f"{operation}: processes disagree: {_differences(seen)}")


def _differences(seen: list[list[tuple[str, str, tuple[int, ...]]]]) -> str:
    counts = {rank: len(description) for rank, description in enumerate(seen)}
    if len(set(counts.values())) > 1:
        return "; ".join(f"process {rank} has {count} tensor(s)" for rank, count in counts.items())
    for index in range(counts[0]):
        column = [description[index] for description in seen]
        if len(set(column)) > 1:
            return "; ".join(
                f"process {rank} has {dtype}{list(shape)}" + (f" at {path}" if path else "")
                for rank, (path, dtype, shape) in enumerate(column)
            )
    return "different keys"


def _checked(operation: Function) -> Function:
    """Verify the first argument in debug mode before the operation, which is left alone otherwise."""

    @wraps(operation)
    def run(data: Any, *args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.debug and state.use_distributed:
            _verify(operation.__name__, data)
        return operation(data, *args, **kwargs)

    return cast(Function, run)


def _tensor_leaves(operation: str, data: Any) -> list[torch.Tensor]:
    found = []
    for path, leaf in leaves(data):
        if not isinstance(leaf, torch.Tensor):
            where = f" at {path}" if path else ""
            raise CollectiveError(
                f"{operation}: {type(leaf).__name__}{where} is not a tensor: use gather_object for objects"
            )
        found.append(leaf)
    return found


@_checked
def gather(data: Any) -> Any:
    """Return ``data`` with each tensor joined, along its first dimension, with those of all processes in rank order.

    A tensor of shape ``(n, …)`` becomes ``(n × processes, …)``, one without dimensions ``(processes,)``. One collective
    for the whole nest. Raises `CollectiveError` for a leaf that is no tensor.
    """
    state = PartialState()
    found = _tensor_leaves("gather", data)
    if not state.use_distributed or not found:
        return data
    return replace_tensors(data, _gather_tensors(found, state))


def _gather_tensors(found: list[torch.Tensor], state: PartialState) -> list[torch.Tensor]:
    packed, layout = pack(found, state.device)
    everyones = packed.new_empty(state.num_processes * packed.numel())
    _all_gather(everyones, packed)
    return unpack(everyones.view(state.num_processes, -1), layout, found)


def gather_object(object: Any) -> Any:
    """Return the items of every process's list, joined in rank order. In a world of one, ``object`` itself."""
    return [item for items in all_objects(object) for item in items] if PartialState().use_distributed else object


def all_objects(value: Any) -> list[Any]:
    """Return the picklable ``value`` of every process, in rank order."""
    state = PartialState()
    if not state.use_distributed:
        return [value]
    seen: list[Any] = [None] * state.num_processes
    dist.all_gather_object(seen, value)
    return seen


@_checked
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill every tensor in ``tensor`` with the values it has on process ``from_process``, and return the nest.

    The tensors are changed in place. One collective for the whole nest.
    """
    state = PartialState()
    found = _tensor_leaves("broadcast", tensor)
    if not state.use_distributed or not found:
        return tensor
    packed, layout = pack(found, state.device)
    dist.broadcast(packed, src=from_process)
    with torch.no_grad():
        for part, leaf in zip(unpack(packed[None], layout, found), found, strict=True):
            leaf.copy_(part.reshape(leaf.shape))
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of ``object_list``, in place, by those on process ``from_process``; one length for all."""
    if PartialState().use_distributed:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@_checked
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return ``tensor`` with each tensor summed (``"sum"``) or averaged (``"mean"``) everywhere, times ``scale``.

    ``"none"`` only scales. One collective a data type. Integers stay integers under ``"sum"`` and become floating point
    under ``"mean"``. Raises `CollectiveError` for booleans and for leaves that are no tensors.
    """
    kind = one_of(reduction, ("sum", "mean", "none"), what="reduction")
    state = PartialState()
    found = _tensor_leaves("reduce", tensor)
    if kind != "none" and state.use_distributed:
        factor = scale / state.num_processes if kind == "mean" else scale
        return replace_tensors(tensor, _sum_tensors(found, factor, state))
    return tensor if scale == 1.0 else replace_tensors(tensor, [leaf * scale for leaf in found])


def _sum_tensors(found: list[torch.Tensor], factor: float, state: PartialState) -> list[torch.Tensor]:
    by_type: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(found):
        if tensor.dtype is torch.bool:
            raise CollectiveError("reduce: a boolean tensor has no sum: convert it, for instance with .int()")
        by_type.setdefault(tensor.dtype, []).append(index)
    summed: dict[int, torch.Tensor] = {}
    for indices in by_type.values():
        summed.update(zip(indices, _sum_alike([found[i] for i in indices], factor, state), strict=True))
    return [summed[index] for index in range(len(found))]


def _sum_alike(alike: list[torch.Tensor], factor: float, state: PartialState) -> list[torch.Tensor]:
    flat = torch.cat([tensor.detach().reshape(-1).to(state.device) for tensor in alike])
    dist.all_reduce(flat)
    if factor != 1.0:
        flat = flat * factor
    pieces = torch.split(flat, [tensor.numel() for tensor in alike])
    return [piece.reshape(t.shape).to(t.device) for piece, t in zip(pieces, alike, strict=True)]


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return ``tensor`` with each tensor padded with ``pad_index`` along ``dim`` to the size of the largest anywhere.

    Padding is put behind the data, or before them with ``pad_first``. Tensors without dimension ``dim``, and those
    that are alike everywhere already, are returned as they are. One small collective for the whole nest.
    """
    state = PartialState()
    found = _tensor_leaves("pad_across_processes", tensor)
    if not state.use_distributed or not found:
        return tensor
    sizes = torch.tensor([_size_along(leaf, dim) for leaf in found], device=state.device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    largest: list[int] = sizes.tolist()
    padded = [_pad(leaf, size, dim, pad_index, pad_first) for leaf, size in zip(found, largest, strict=True)]
    return replace_tensors(tensor, padded)


def _size_along(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else -1


def _pad(tensor: torch.Tensor, size: int, dim: int, value: float, first: bool) -> torch.Tensor:
    own = _size_along(tensor, dim)
    if own == size or own < 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size - own
    filling = tensor.new_full(shape, cast(int, value))
    return torch.cat([filling, tensor] if first else [tensor, filling], dim=dim)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join a sequence of nests of one shape into one nest, each tensor along ``dim``."""
    if not data:
        raise ArgumentError("concatenate: nothing to join")
    columns = zip(*([leaf for _, leaf in leaves(item)] for item in data), strict=True)
    joined = iter([torch.cat(column, dim=dim) for column in columns])
    return map_nested(lambda _: next(joined), data[0])


def wait_for_everyone() -> None:
    """Return when every process has called this as often as this one."""
    PartialState().wait_for_everyone()
