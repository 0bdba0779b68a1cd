"""The memory of each of N processes in training, by strategy: arithmetic alone.

ZeRO's shares are those of its paper (https://arxiv.org/abs/1910.02054, section 5); its optimizer always keeps
float32 weights besides Adam's two averages. FSDP and DDP keep float32 weights and compute in the half type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
TITLES = {"ddp": "DDP", "fsdp": "FSDP full shard", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of elements of a model.

    trained: all trained elements.
    fixed:   bytes that are neither trained nor sharded (buffers, frozen weights).
    unit:    the largest part that is gathered at a time.
    outside: all that is in no such part.
    leaf:    the largest module that holds weights directly.
    """

    trained: int
    fixed: int
    unit: int
    outside: int
    leaf: int


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on each device, by part. ``activations`` is None if unknown, and then counts as 0."""

    strategy: str
    dtype: str
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    step: int

    @property
    def total(self) -> int:
        """The peak bytes: while gradients are computed, or during the optimizer's step."""
        held = self.weights + self.gradients + self.optimizer
        if self.strategy == "ddp":
            return held + self.gathered + max(self.activations or 0, self.step)
        return held + max(self.gathered + (self.activations or 0), self.step)


def needs(shape: Shape, processes: int, dtype: str, activations: Mapping[str, int | None]) -> list[Need]:
    """Return one `Need` per strategy. ``activations`` has bytes by way: ``float32``, ``autocast``, ``bfloat16``."""
    return [_need(strategy, shape, processes, dtype, activations) for strategy in STRATEGIES]


def _need(strategy: str, shape: Shape, n: int, dtype: str, activations: Mapping[str, int | None]) -> Need:
    full = dtype == "float32"
    compute = 4 if full else 2
    zero = strategy.startswith("zero")
    each = compute if zero else 4  # bytes of a weight that is kept, and of its gradient
    state = 12 if zero else 8
    split = {"ddp": (), "fsdp": "wgo", "zero1": "o", "zero2": "go", "zero3": "wgo"}[strategy]

    def share(size: int, part: str) -> int:
        return size * (math.ceil(shape.trained / n) if part in split else shape.trained)

    way = "float32" if full else "autocast" if strategy == "ddp" else "bfloat16"
    return Need(
        strategy=strategy,
        dtype=dtype,
        weights=share(each, "w") + shape.fixed,
        gradients=share(each, "g"),
        optimizer=share(state, "o"),
        gathered=_gathered(strategy, shape, n, compute),
        activations=activations.get(way),
        step=share(4, "o"),  # a temporary of Adam's for every weight that this process steps
    )


def _gathered(strategy: str, shape: Shape, n: int, compute: int) -> int:
    """Return the bytes of gathered weights, with the next part prefetched, and of one part's whole gradients."""
    if n == 1:
        return 0
    if strategy == "ddp":
        return 4 * shape.trained  # the buckets in which gradients travel
    if strategy == "fsdp":
        whole = min(shape.trained, shape.outside + 2 * shape.unit)
        return compute * (whole + 2 * max(shape.unit, shape.outside))  # gradients are copied together to be reduced
    largest = max(shape.unit, shape.leaf)
    return compute * (min(shape.trained, 2 * largest) + largest) if strategy == "zero3" else 0
