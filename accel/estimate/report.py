"""The report on one model: its size by type, and the memory of training on each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from accel.big_models.memory_estimate import estimate_training_usage
from accel.big_models.sizes import class_names, compute_module_sizes, direct_parts, get_max_layer_size
from accel.estimate.activations import Unmeasured, Way, measure
from accel.estimate.model_source import Subject, on_meta
from accel.estimate.per_process import Need, Shape, needs

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

    layers:     the names of the largest ones.
    unmeasured: why activations are unknown, or None.
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
    """Return the report on ``subject``, without activations if it cannot run. Raises its builder's errors."""
    model = on_meta(subject)
    length = sequence_length or min(512, subject.longest or 512)
    shape, unit = shape_of(model)
    trained_in = [dtype for dtype in dtypes if dtype in TRAINED_IN]
    ways = dict.fromkeys(_ways(trained_in))
    found, unmeasured = _activations(subject, list(ways), batch_size, length, checkpointing)
    return Report(
        subject=subject,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=shape.trained,
        layers=_largest(model, "float32")[1],
        unit=unit,
        sizes=[size_of(model, dtype) for dtype in dtypes],
        needs=[need for dtype in trained_in for need in needs(shape, processes, dtype, found)],
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
    """Return the numbers of elements in ``model``, and the class of the parts that are gathered one by one."""
    trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    held = {
        id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()] if id(t) not in trained
    }
    units = _units(model)
    sizes = [sum(trained.get(id(p), 0) for p in unit.parameters()) for unit in units]
    inside = {id(p) for unit in units for p in unit.parameters()}
    outside = sum(size for key, size in trained.items() if key not in inside)
    leaves = (sum(trained.get(id(p), 0) for p in m.parameters(recurse=False)) for m in model.modules())
    shape = Shape(
        trained=sum(trained.values()),
        fixed=sum(held.values()),
        unit=max(sizes, default=0),
        outside=outside,
        leaf=max(leaves),
    )
    return shape, type(units[0]).__name__ if units else "the whole model"


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks: those named by transformers, else the list of modules with the most weights."""
    named = class_names(getattr(model, "_no_split_modules", None))
    found = [module for module in model.modules() if type(module).__name__ in named]
    if found:
        return found
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    return list(max(lists, key=_weight, default=nn.ModuleList()).children())


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _ways(dtypes: Sequence[str]) -> list[Way]:
    half: list[Way] = ["autocast", "bfloat16"] if any(dtype != "float32" for dtype in dtypes) else []
    return [*(["float32"] if "float32" in dtypes else []), *half]  # type: ignore[list-item]


def _activations(
    subject: Subject, ways: Sequence[Way], batch: int, length: int, checkpointing: bool
) -> tuple[dict[str, int | None], str | None]:
    found: dict[str, int | None] = {}
    for way in ways:
        try:
            found[way] = measure(subject, way, batch_size=batch, sequence_length=length, checkpointing=checkpointing)
        except Unmeasured as error:
            return {}, str(error)
    return found, None


def as_json(found: Report) -> dict[str, Any]:
    """Return the report as plain values, in bytes."""
    return {
        "model": found.subject.name,
        "library": found.subject.library,
        "parameters": found.parameters,
        "trained": found.trained,
        "largest_layers": found.layers,
        "sizes": [vars(size) for size in found.sizes],
        "processes": found.processes,
        "batch_size": found.batch_size,
        "sequence_length": found.sequence_length,
        "needs": [{**vars(need), "total": need.total} for need in found.needs],
        "activations_unknown": found.unmeasured,
    }
