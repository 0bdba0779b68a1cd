"""Causal attention to a whole sequence by passing its keys and values around a ring of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from accel.errors import ArgumentError
from accel.parallel.parts import Gathered, repeat_heads

_HALVES = (torch.float16, torch.bfloat16)
_aten: Any = torch.ops.aten


class Ring(Gathered):
    """Parts as in `Gathered`; keys and values pass from process to process. Without masks and dropout.

    Attention to each part is by torch's flash kernels, and joined by its log-sum-exp.
    """

    def attention(
        self,
        function: Callable[..., torch.Tensor],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        **more: Any,
    ) -> torch.Tensor:
        """Return the attention of this process's queries to all keys. Raises `ArgumentError` for what a ring lacks."""
        query, key, value = qkv
        if not is_causal or mask is not None or more.get("dropout_p"):
            kind = "a mask" if mask is not None else "dropout" if is_causal else "attention that is not causal"
            raise ArgumentError(f"TorchContextParallelConfig('alltoall') does not support {kind}: use 'allgather'")
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (part.to(dtype) for part in (query, key, value))
        if not query.is_cpu and query.dtype not in _HALVES:
            raise ArgumentError(
                f"TorchContextParallelConfig('alltoall') needs bf16 or fp16 on {query.device.type}, not {query.dtype}: "
                "set mixed_precision, or use 'allgather'"
            )
        if enable_gqa:
            key, value = repeat_heads(query, key), repeat_heads(query, value)
        apply: Callable[..., torch.Tensor] = _RingAttention.apply
        return apply(query, key, value, self.mesh.get_group(), more.get("scale"))


class _RingAttention(torch.autograd.Function):
    """``(query, key, value, group, scale)`` → output; all of shape (batch, heads, part of the sequence, width)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """Attend to the own part, then to those that arrive."""
        query, key, value, ctx.group, ctx.scale = args
        own_key, own_value = key, value
        rank, size = ctx.group.rank(), ctx.group.size()
        ctx.extras = []
        output = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        sums = torch.full_like(output[..., 0], -torch.inf)
        for step in range(size):
            if step:
                key, value = _pass_on(torch.stack([key, value]), ctx.group)
            rows, columns = _block(step, rank, query.shape[-2])
            part, part_sums, extra = _flash(
                query[..., rows, :], key[..., columns, :], value[..., columns, :], step == 0, ctx.scale
            )
            ctx.extras.append(extra)
            _join(output[..., rows, :], sums[..., rows], part, part_sums)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, own_key, own_value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the gradients of keys and values on with them, until they are home."""
        query, key, value, output, sums = ctx.saved_tensors
        rank, size = ctx.group.rank(), ctx.group.size()
        dtype = sums.dtype
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_pair = torch.zeros_like(torch.stack([key, value]), dtype=dtype)
        for step in range(size):
            if step:
                key, value = _pass_on(torch.stack([key, value]), ctx.group)
                grad_pair = _pass_on(grad_pair, ctx.group)
            rows, columns = _block(step, rank, query.shape[-2])
            of_query, of_key, of_value = _flash_backward(
                (grads[0][..., rows, :], query[..., rows, :], key[..., columns, :], value[..., columns, :]),
                (output[..., rows, :], sums[..., rows]),
                step == 0,
                ctx.extras[step],
                ctx.scale,
            )
            grad_query[..., rows, :] += of_query
            grad_pair[..., columns, :] += torch.stack([of_key, of_value])
        grad_key, grad_value = _pass_on(grad_pair, ctx.group)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _block(step: int, rank: int, length: int) -> tuple[slice, slice]:
    """Return the queries that attend to the part which arrives in a step, and the keys of it that they attend to.

    A part has a head and a tail chunk. Those of an earlier process have a head before all own queries, and a tail
    after them; those of a later one are between the own head and tail.
    """
    full, half = slice(None), length // 2
    if step == 0:
        return full, full
    return (full, slice(half)) if step <= rank else (slice(half, None), full)


def _pass_on(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Send ``tensor`` to the next process, and return the tensor of the previous one."""
    from torch.distributed._functional_collectives import permute_tensor

    size = group.size()
    received: torch.Tensor = permute_tensor(tensor.flatten(), [*range(1, size), 0], group)
    return received.view(tensor.shape).clone()  # waits for it


def _join(output: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor) -> None:
    """Join attention to further keys into ``output`` and its log-sum-exp, in place."""
    joined = torch.logaddexp(sums, part_sums.to(sums.dtype))
    output *= (sums - joined).exp()[..., None]
    output += part * (part_sums - joined).exp()[..., None]
    sums.copy_(joined)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return output, log-sum-exp, and what the backward kernel wants besides."""
    if query.is_cpu:
        return *_aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale), ()
    output, sums, *extra = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return output, sums, tuple(extra[:6])


def _flash_backward(
    inputs: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
    causal: bool,
    extra: tuple[Any, ...],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = [part.contiguous() for part in (*inputs, *results)]
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if not extra:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = kernel(*arguments, 0.0, causal, scale=scale)
    else:
        lengths, random = extra[:4], extra[4:]
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *arguments, *lengths, 0.0, causal, *random, scale=scale
        )
    return gradients
