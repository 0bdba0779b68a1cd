"""Two ways to share a sequence: `Gathered` (context parallelism) and `Ulysses` (sequence parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accel.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Gathered:
    """Process r of n has chunks r and 2n-1-r of 2n, equal work in causal attention, and gathers keys and values.

    ``length``: of this process's part; None if the script passed no buffers. ``reached``: attention was computed.
    ``packed``: the positions, and the indices of sequences in a row, that a model of transformers has packed.
    """

    setting: ClassVar[str] = "cp_size"
    chunks: ClassVar[int] = 2  # of each process

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.length: int | None = None
        self.reached = False
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def size(self) -> int:
        """The number of processes with parts of one sequence."""
        return self.mesh.size()

    def own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of ``whole`` along ``dim``."""
        chunks, rank = whole.chunk(2 * self.size, dim), self.mesh.get_local_rank()
        return torch.cat([chunks[rank], chunks[-1 - rank]], dim)

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all parts, joined along ``dim``; backward sums the gradients of all processes."""
        heads, tails = zip(*(other.chunk(2, dim) for other in self._all_parts(part)), strict=True)
        return torch.cat([*heads, *reversed(tails)], dim)

    def queries(self, total: int) -> torch.Tensor:
        """Return the positions, in a sequence of ``total``, of the queries that attention gets."""
        return self.own_part(torch.arange(total), 0)

    def _all_parts(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.distributed import _functional_collectives as collectives

        # torch.distributed.nn's gather has wrong gradients. The name in torch before 2.13 is the second.
        gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
        joined: torch.Tensor = gather(part.contiguous(), 0, self.mesh.get_group())
        return joined.chunk(self.size)

    def check(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise `ArgumentError` for queries, keys or a mask that do not fit the part."""
        length = query.shape[-2] if self.length is None else self.length
        total = length * self.size
        if (query.shape[-2], key.shape[-2]) != (length, length) or length % self.chunks:
            raise ArgumentError(
                f"scaled_dot_product_attention: {query.shape[-2]} queries and {key.shape[-2]} keys in a block of "
                f"maybe_context_parallel, where a process has {length} of a sequence of {total}: call it with the part"
            )
        rows = [length, total, 1] if self.setting == "cp_size" else [total, 1]
        if mask is not None and (mask.shape[-1] != total or (mask.shape[-2] if mask.ndim > 1 else 1) not in rows):
            *shapes, last = (f"({count}, {total})" for count in rows)
            raise ArgumentError(
                f"scaled_dot_product_attention: a mask of shape {tuple(mask.shape)} in a block of "
                f"maybe_context_parallel: its last dimensions must be {', '.join(shapes)} or {last}; for causal "
                "attention pass is_causal=True"
            )

    def attention(
        self,
        function: Callable[..., torch.Tensor],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        **more: Any,
    ) -> torch.Tensor:
        """Return the attention of this process's queries to all keys, by torch's ``function``."""
        query, key, value = qkv[0], self.whole(qkv[1], -2), self.whole(qkv[2], -2)
        if not is_causal:
            if mask is not None and mask.ndim > 1 and mask.shape[-2] == key.shape[-2]:
                mask = self.own_part(mask, -2)
            return function(query, key, value, mask, enable_gqa=enable_gqa, **more)
        if enable_gqa:  # which torch's kernels for this bias do not have
            key, value = repeat_heads(query, key), repeat_heads(query, value)
        from torch.nn.attention.bias import causal_lower_right

        rank, chunk = self.mesh.get_local_rank(), query.shape[-2] // 2
        ends = (rank + 1) * chunk, (2 * self.size - rank) * chunk
        outputs = [
            function(part, key[..., :end, :], value[..., :end, :], causal_lower_right(chunk, end), **more)
            for part, end in zip(query.chunk(2, -2), ends, strict=True)
        ]
        return torch.cat(outputs, -2)


class Ulysses(Gathered):
    """Process r of n has chunk r of n, and for attention the whole sequence of 1/n of the heads."""

    setting = "sp_size"
    chunks = 1

    def own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's part of ``whole`` along ``dim``."""
        return whole.chunk(self.size, dim)[self.mesh.get_local_rank()].contiguous()

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return all parts, joined along ``dim``."""
        return torch.cat(self._all_parts(part), dim)

    def queries(self, total: int) -> torch.Tensor:
        """Return the positions of the queries that attention gets: all."""
        return torch.arange(total)

    def check(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise `ArgumentError` for queries, keys, heads or a mask that do not fit the part."""
        super().check(query, key, mask)
        heads = query.shape[-3] if query.ndim > 3 else 1
        if heads % self.size:
            raise ArgumentError(
                f"scaled_dot_product_attention: {heads} heads cannot be shared equally by sp_size={self.size} processes"
            )

    def attention(
        self,
        function: Callable[..., torch.Tensor],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        **more: Any,
    ) -> torch.Tensor:
        """Return the attention of this process's queries to all keys, by torch's ``function``."""
        query, key, value = qkv
        if enable_gqa and key.shape[-3] % self.size:
            key, value = repeat_heads(query, key), repeat_heads(query, value)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(self.size, -3)[self.mesh.get_local_rank()]
        query, key, value = (self._exchange(part, -3, -2) for part in (query, key, value))
        output = function(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa, **more)
        return self._exchange(output, -2, -3)

    def _exchange(self, tensor: torch.Tensor, split: int, join: int) -> torch.Tensor:
        """Send a part of dimension ``split`` to each process, and join those received along dimension ``join``."""
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        parts = torch.stack(tensor.chunk(self.size, split))
        received = all_to_all_single_autograd(parts, None, None, self.mesh.get_group())
        return torch.cat(received.unbind(), join)


def repeat_heads(query: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return keys or values with as many heads as ``query``."""
    return part.repeat_interleave(query.shape[-3] // part.shape[-3], -3)


@dataclass
class State:
    """``region``: the open one. ``cut``: the last forward pass that computed attention was in a region."""

    region: Gathered | None = None
    cut: bool = False


state = State()
