"""Blocks in which processes share each sequence, by `accel.parallel.parts`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.nn import functional

from accel.errors import ArgumentError, StateError
from accel.parallel.masks import prepare_models, split_masks
from accel.parallel.parts import Gathered, state
from accel.parallel.unwrap import data_parallel, unwrap

_attention_of_torch: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
_patched: WeakSet[torch.nn.Module] = WeakSet()  # models whose Python modules have the replacement


@contextmanager
def split_sequences(
    region: Gathered,
    models: Iterable[torch.nn.Module],
    buffers: Sequence[torch.Tensor] = (),
    dims: Sequence[int] = (),
    no_restore: Collection[torch.Tensor] = (),
) -> Iterator[None]:
    """Cut ``buffers`` along ``dims`` to this process's part of ``region`` in the block; ``models`` attend to all parts.

    Buffers are restored at the end, except those that are ``no_restore``. From the first block on, torch's
    `scaled_dot_product_attention` is replaced, also where a model's Python module imported it by name: in a block it
    gathers keys and values, elsewhere it calls torch's. Models of transformers get masks and positions of the parts.

    Raises `ArgumentError` for buffers that cannot be cut, and `StateError` for a block within a block or without
    attention.
    """
    if state.region is not None:
        raise StateError("maybe_context_parallel: a block within a block: leave the first one before")
    models = list(models)
    cuts = _resolve_cuts(buffers, dims, no_restore, region)
    for model in map(unwrap, models):
        if model not in _patched:
            _patch_modules(model)
            prepare_models(model)
            _patched.add(model)
    functional.scaled_dot_product_attention = _replacement()
    originals = [(buffer, buffer.data) for buffer, _ in cuts]
    synced = [wrapped for model in models if (wrapped := data_parallel(model)) is not None and _has(wrapped, buffers)]
    synced = [wrapped for wrapped in synced if wrapped.broadcast_buffers]
    try:
        for wrapped in synced:
            wrapped.broadcast_buffers = False  # DDP would send the main process's part to all
        for buffer, dim in cuts:
            buffer.data = region.own_part(buffer.data, dim)
        state.region = region
        with split_masks():
            yield
        if not region.reached:
            raise StateError(
                "maybe_context_parallel: no attention was computed in the block by "
                "torch.nn.functional.scaled_dot_product_attention, so the parts of a sequence did not see each other: "
                "compute attention with it"
            )
    finally:
        state.region = None
        for buffer, original in originals:
            if not any(buffer is other for other in no_restore):
                buffer.data = original
        for wrapped in synced:
            wrapped.broadcast_buffers = True


def _has(model: torch.nn.Module, buffers: Sequence[torch.Tensor]) -> bool:
    return any(own is buffer for own in model.buffers() for buffer in buffers)


def _resolve_cuts(
    buffers: Sequence[torch.Tensor], dims: Sequence[int], no_restore: Collection[torch.Tensor], region: Gathered
) -> list[tuple[torch.Tensor, int]]:
    """Return each buffer once, with its dimension; set the region's length. Raises `ArgumentError`."""
    call = "maybe_context_parallel"
    if len(buffers) != len(dims):
        raise ArgumentError(f"{call}: {len(buffers)} buffers and {len(dims)} buffer_seq_dims: pass one for each")
    if not all(any(tensor is buffer for buffer in buffers) for tensor in no_restore):
        raise ArgumentError(f"{call}: no_restore_buffers has a tensor that is not in buffers")
    parts = region.chunks * region.size
    factor = f"{region.chunks} × " if region.chunks > 1 else ""
    cuts: list[tuple[torch.Tensor, int]] = []
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        name = f"{call}: buffers[{index}]"
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ArgumentError(f"{name} of shape {tuple(buffer.shape)} has no dimension {dim}")
        if buffer.requires_grad:
            raise ArgumentError(f"{name} requires a gradient: pass positions instead, and index it with them")
        length = buffer.shape[dim]
        if length % parts:
            raise ArgumentError(
                f"{name}: sequence length ({length}, dimension {dim}) is not divisible by "
                f"{factor}{region.setting} ({region.size}): pad it to {length + -length % parts}"
            )
        if region.length not in (None, length // region.size):
            raise ArgumentError(
                f"{name} has a sequence of {length} and buffers[0] of {buffers[0].shape[dims[0]]}: they must be equal"
            )
        region.length = length // region.size
        if not any(buffer is other for other, _ in cuts):
            cuts.append((buffer, dim))
    return cuts


@cache
def _replacement() -> Callable[..., torch.Tensor]:
    """Return `_attention`, always the same function, as compiled models are guarded by it; it is not compiled."""
    replacement: Callable[..., torch.Tensor] = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]
    return replacement


def _patch_modules(model: torch.nn.Module) -> None:
    """Replace the function where the Python modules of ``model`` imported it by name."""
    for name in {kind.__module__ for part in model.modules() for kind in type(part).__mro__}:
        module = sys.modules.get(name)
        for key, value in list(vars(module).items()) if module is not None else ():
            if value is _attention_of_torch and not name.startswith("accel."):
                setattr(module, key, _replacement())


def _call_torch(*args: Any, **kwargs: Any) -> torch.Tensor:
    # `CausalBias` compares with the function that has the name.
    functional.scaled_dot_product_attention = _attention_of_torch
    try:
        return _attention_of_torch(*args, **kwargs)
    finally:
        functional.scaled_dot_product_attention = _replacement()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    """Compute attention of this process's queries to all keys, with the signature of torch's function."""
    region, in_backward = state.region, torch._C._current_graph_task_id() != -1
    if not in_backward:
        state.cut = region is not None
    if region is None:
        if in_backward and state.cut:
            raise StateError(
                "backward: activations are computed again after the block of maybe_context_parallel, where keys are "
                "not gathered: call accelerator.backward(loss) in the block"
            )
        return _call_torch(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if attn_mask is not None and is_causal:
        raise ArgumentError("scaled_dot_product_attention: pass attn_mask or is_causal, not both")
    region.check(query, key, attn_mask)
    region.reached = True
    enable_gqa = more.pop("enable_gqa", False)
    return region.attention(
        _call_torch, (query, key, value), attn_mask, is_causal, enable_gqa, dropout_p=dropout_p, **more
    )
