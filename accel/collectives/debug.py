"""A check that all processes call the same collective with matching data.

It precedes every collective in debug mode (``ACCELERATE_DEBUG_MODE=1``): one collective of sixteen bytes per
process and, only if these differ, one of the full descriptions for the error message.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from accel.errors import CollectiveError
from accel.pytree import leaves
from accel.state import PartialState


class Leaf(NamedTuple):
    """The path, type and shape of a tensor, which must be equal on all processes."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    def without_sizes(self) -> Leaf:
        """Return this leaf with -1 for each size."""
        return self._replace(shape=(-1,) * len(self.shape))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" at {self.path}" if self.path else "")


class Call(NamedTuple):
    """The collective call of one process."""

    operation: str
    description: str
    leaves: list[Leaf]


def describe(data: Any) -> list[Leaf]:
    """Return a `Leaf` for each tensor in ``data``, in order."""
    return [
        Leaf(path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for path, leaf in leaves(data)
        if isinstance(leaf, torch.Tensor)
    ]


def verify(state: PartialState, operation: str, description: str = "", data: Any = (), *, sizes: bool = True) -> None:
    """Raise `CollectiveError` on every process, in debug mode, unless all call ``operation`` with equal description.

    The types and shapes of the tensors in ``data`` must be equal too; without ``sizes`` only the numbers of dimensions.
    """
    if not state.debug:
        return
    tensors = describe(data)
    call = Call(operation, description, tensors if sizes else [leaf.without_sizes() for leaf in tensors])
    digest = torch.tensor([crc32(repr(call[:2]).encode()), crc32(repr(call[2]).encode())], device=state.device)
    digests = [torch.empty_like(digest) for _ in range(state.num_processes)]
    dist.all_gather(digests, digest)
    if all(torch.equal(digest, other) for other in digests):
        return
    calls: list[Any] = [None] * state.num_processes
    dist.all_gather_object(calls, call)
    raise CollectiveError(_difference(calls))


def _difference(calls: list[Call]) -> str:
    if len({call.operation for call in calls}) > 1:
        return "processes called different operations: " + _per_process(f"called {call.operation}" for call in calls)
    start = f"{calls[0].operation}: processes disagree: "
    if len({call.description for call in calls}) > 1:
        return start + _per_process(f"passed {call.description}" for call in calls)
    if len({len(call.leaves) for call in calls}) > 1:
        return start + _per_process(f"has {len(call.leaves)} tensor(s)" for call in calls)
    columns = zip(*(call.leaves for call in calls), strict=True)
    differing = next(column for column in columns if len(set(column)) > 1)
    only_sizes = calls[0].operation == "gather" and len({leaf.without_sizes() for leaf in differing}) == 1
    remedy = "; pad_across_processes makes sizes equal" if only_sizes else ""
    return start + _per_process(f"has {leaf}" for leaf in differing) + remedy


def _per_process(texts: Any) -> str:
    return "; ".join(f"process {rank} {text}" for rank, text in enumerate(texts))
