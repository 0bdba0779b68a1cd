"""The memory report on one model: its size by type, and the memory that training needs on each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel.big_models.sizes import (
    class_names,
    compute_module_sizes,
    direct_parts,
    estimate_training_usage,
    get_max_layer_size,
)
from accel.estimate.activations import ComputeMode, Unmeasured, measure
from accel.estimate.find import Subject, on_meta

# The memory of each of N processes in training, by strategy.
#
# ZeRO's shares are those of its paper (https://arxiv.org/abs/1910.02054, section 5); its optimizer always keeps
# float32 weights besides Adam's two averages. FSDP and DDP keep float32 weights and compute in the half type.

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
TITLES = {"ddp": "DDP", "fsdp": "FSDP full shard", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of trained elements of a model, except `fixed`.

    trained: in all.
    fixed:   bytes of tensors that are neither trained nor sharded (buffers, frozen weights).
    unit:    in the largest block that is gathered at a time.
    outside: outside of all blocks.
    leaf:    in the largest module, without its children.
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
        resident = self.weights + self.gradients + self.optimizer
        if self.strategy == "ddp":
            return resident + self.gathered + max(self.activations or 0, self.step)
        return resident + max(self.gathered + (self.activations or 0), self.step)


def needs(shape: Shape, processes: int, dtype: str, activations: Mapping[str, int | None]) -> list[Need]:
    """Return one `Need` per strategy. ``activations`` has bytes by mode: ``float32``, ``autocast``, ``bfloat16``."""
    return [_need(strategy, shape, processes, dtype, activations) for strategy in STRATEGIES]


def _need(strategy: str, shape: Shape, n: int, dtype: str, activations: Mapping[str, int | None]) -> Need:
    full = dtype == "float32"
    compute = 4 if full else 2
    zero = strategy.startswith("zero")
    weight_bytes = compute if zero else 4  # bytes of a stored weight, and of its gradient
    state = 12 if zero else 8
    split = {"ddp": (), "fsdp": "wgo", "zero1": "o", "zero2": "go", "zero3": "wgo"}[strategy]

    def share(size: int, part: str) -> int:
        return size * (math.ceil(shape.trained / n) if part in split else shape.trained)

    mode = "float32" if full else "autocast" if strategy == "ddp" else "bfloat16"
    return Need(
        strategy=strategy,
        dtype=dtype,
        weights=share(weight_bytes, "w") + shape.fixed,
        gradients=share(weight_bytes, "g"),
        optimizer=share(state, "o"),
        gathered=_gathered(strategy, shape, n, compute),
        activations=activations.get(mode),
        step=share(4, "o"),  # Adam's temporary for every weight that this process updates
    )


def _gathered(strategy: str, shape: Shape, n: int, compute: int) -> int:
    """Return the bytes of gathered weights, including the prefetched block's, and of one block's full gradients."""
    if n == 1:
        return 0
    if strategy == "ddp":
        return 4 * shape.trained  # DDP's gradient buckets
    if strategy == "fsdp":
        gathered = min(shape.trained, shape.outside + 2 * shape.unit)
        return compute * (gathered + 2 * max(shape.unit, shape.outside))  # gradients are copied for the reduction
    largest = max(shape.unit, shape.leaf)
    return compute * (min(shape.trained, 2 * largest) + largest) if strategy == "zero3" else 0


# The report.

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
TRAINED_IN = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes of the model in one type; ``training`` by part as in `estimate_training_usage`, or None."""

    dtype: str
    largest_layer: int
    total: int
    training: dict[str, int] | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report on one model.

    layers:     the names of the largest layers.
    unit:       the class of the blocks that are gathered one by one.
    unmeasured: the reason for unknown activations, or None.
    """

    subject: Subject
    parameters: int
    trained: int
    layers: list[str]
    unit: str
    sizes: list[Size]
    needs: list[Need]
    batch_size: int
    sequence_length: int
    processes: int
    unmeasured: str | None


def report(
    subject: Subject,
    dtypes: Sequence[str],
    *,
    processes: int,
    batch_size: int = 1,
    sequence_length: int | None = None,
    checkpointing: bool = False,
) -> Report:
    """Return the report on ``subject``, without activations if it cannot run. Raises `NotFound` or `ArgumentError`."""
    model = on_meta(subject)
    length = sequence_length or min(512, subject.longest or 512)
    shape, unit = shape_of(model)
    trained_in = [dtype for dtype in dtypes if dtype in TRAINED_IN]
    modes = dict.fromkeys(_compute_modes(trained_in))
    activations, unmeasured = _activations(subject, list(modes), batch_size, length, checkpointing)
    return Report(
        subject=subject,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=shape.trained,
        layers=_largest(model, "float32")[1],
        unit=unit,
        sizes=[size_of(model, dtype) for dtype in dtypes],
        needs=[need for dtype in trained_in for need in needs(shape, processes, dtype, activations)],
        batch_size=batch_size,
        sequence_length=length,
        processes=processes,
        unmeasured=unmeasured,
    )


def size_of(model: nn.Module, dtype: str) -> Size:
    """Return the size of a float32 ``model`` in ``dtype``; its integers keep their type."""
    total, (largest, _) = int(compute_module_sizes(model, dtype=dtype)[""]), _largest(model, dtype)
    full = int(compute_module_sizes(model)[""])
    training = estimate_training_usage(full, dtype) if dtype in TRAINED_IN else None
    return Size(dtype=dtype, largest_layer=int(largest), total=total, training=training)


def _largest(model: nn.Module, dtype: str) -> tuple[int | float, list[str]]:
    sizes = compute_module_sizes(model, dtype=dtype)
    return get_max_layer_size(direct_parts(model), sizes, class_names(getattr(model, "_no_split_modules", None)))


def shape_of(model: nn.Module) -> tuple[Shape, str]:
    """Return the `Shape` of ``model``, and the class name of its blocks."""
    trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    fixed_sizes = {
        id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()] if id(t) not in trained
    }
    units = _units(model)
    sizes = [sum(trained.get(id(p), 0) for p in unit.parameters()) for unit in units]
    unit_ids = {id(p) for unit in units for p in unit.parameters()}
    outside = sum(size for key, size in trained.items() if key not in unit_ids)
    leaves = (sum(trained.get(id(p), 0) for p in m.parameters(recurse=False)) for m in model.modules())
    shape = Shape(
        trained=sum(trained.values()),
        fixed=sum(fixed_sizes.values()),
        unit=max(sizes, default=0),
        outside=outside,
        leaf=max(leaves),
    )
    return shape, type(units[0]).__name__ if units else "the whole model"


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks: those named by transformers, else the list of modules with the most weights."""
    block_classes = class_names(getattr(model, "_no_split_modules", None))
    blocks = [module for module in model.modules() if type(module).__name__ in block_classes]
    if blocks:
        return blocks
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    return list(max(lists, key=_weight, default=nn.ModuleList()).children())


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _compute_modes(dtypes: Sequence[str]) -> list[ComputeMode]:
    half: list[ComputeMode] = ["autocast", "bfloat16"] if any(dtype != "float32" for dtype in dtypes) else []
    return [*(["float32"] if "float32" in dtypes else []), *half]  # type: ignore[list-item]


def _activations(
    subject: Subject, modes: Sequence[ComputeMode], batch: int, length: int, checkpointing: bool
) -> tuple[dict[str, int | None], str | None]:
    activations: dict[str, int | None] = {}
    for mode in modes:
        try:
            activations[mode] = measure(
                subject, mode, batch_size=batch, sequence_length=length, checkpointing=checkpointing
            )
        except Unmeasured as error:
            return {}, str(error)
    return activations, None


def as_json(memory_report: Report) -> dict[str, Any]:
    """Return the report as plain values, in bytes."""
    return {
        "model": memory_report.subject.name,
        "library": memory_report.subject.library,
        "parameters": memory_report.parameters,
        "trained": memory_report.trained,
        "largest_layers": memory_report.layers,
        "sizes": [vars(size) for size in memory_report.sizes],
        "processes": memory_report.processes,
        "batch_size": memory_report.batch_size,
        "sequence_length": memory_report.sequence_length,
        "needs": [{**vars(need), "total": need.total} for need in memory_report.needs],
        "activations_unknown": memory_report.unmeasured,
    }
