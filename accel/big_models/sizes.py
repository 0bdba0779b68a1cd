"""Sizes of a model by tensor, module and layer, and estimates of its memory for inference and training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from accel.big_models.devices import dtype_named
from accel.big_models.module_tensors import is_real, named_module_tensors
from accel.errors import ArgumentError, nearest, one_of

# A type of torch, its name, or a type that torch has no tensors of, such as "int4" or `CustomDtype.INT4`.
Dtype = str | torch.dtype | Enum
Named = tuple[str, nn.Module | torch.Tensor]

_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PACKED = {"fp8": 1.0, "int4": 1 / 2, "int2": 1 / 4, "nf4": 1 / 2, "fp4": 1 / 2}


def convert_file_size_to_int(size: int | str) -> int:
    """Parse ``size`` in bytes: a number, or text such as ``"5GB"`` (10⁹), ``"5GiB"`` (2³⁰) or ``"5Gb"`` (bits).

    Raises `ArgumentError` for a negative size and for any other text.
    """
    if isinstance(size, int):
        if size >= 0:
            return size
        raise ArgumentError(f"size {size} is negative: use bytes, or a number with a unit such as '5GB' or '5GiB'")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", size)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        hint = nearest(unit, _UNITS) if unit else ""
        raise ArgumentError(f"size {size!r} must be a number with one of the units {', '.join(_UNITS)}{hint}")
    in_bytes = int(float(match[1]) * _UNITS[unit])
    return in_bytes // 8 if match[2].endswith("b") and not unit.endswith("IB") else in_bytes


def dtype_byte_size(dtype: Dtype) -> int | float:
    """Return the bytes per element of ``dtype``: 4 for float32, 1 for bool, 0.5 for int4.

    Raises `ArgumentError` for an unknown name.
    """
    if isinstance(dtype, Enum):
        dtype = str(dtype.value)
    name = str(dtype).removeprefix("torch.")
    if name in _PACKED:
        return _int_if_integral(_PACKED[name])
    narrow = re.fullmatch(r"u?int([1-7])", name)
    if narrow:
        return int(narrow[1]) / 8
    torch_dtype = dtype_named(dtype)
    if torch_dtype is None:
        raise ArgumentError(f"dtype {dtype!r} is unknown: use, for example, 'float16', torch.bfloat16 or 'int4'")
    return torch_dtype.itemsize


def _int_if_integral(size: float) -> int | float:
    return int(size) if size == int(size) else size


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int | float]:
    """Return the bytes of every tensor and every module of ``model`` by name; ``""`` is the whole model.

    ``dtype`` is the type that weights will be loaded as: it never makes one larger and affects no integers.
    ``special_dtypes`` sets the type of single tensors. A tied weight counts once, under its first name.
    """
    size_as = None if dtype is None else dtype_byte_size(dtype)
    special = {name: dtype_byte_size(kind) for name, kind in (special_dtypes or {}).items()}
    sizes: defaultdict[str, int | float] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        element_bytes: int | float = tensor.element_size()
        if name in special:
            element_bytes = special[name]
        elif size_as is not None and is_real(tensor):
            element_bytes = min(size_as, element_bytes)
        size = tensor.numel() * element_bytes
        for module in _with_parents(name):
            sizes[module] += size
    return sizes


def _with_parents(name: str) -> Iterator[str]:
    yield ""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int | float:
    """Return the bytes of all buffers of ``model``."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[Named], module_sizes: Mapping[str, int | float], no_split_module_classes: Collection[str]
) -> tuple[int | float, list[str]]:
    """Return the size of the largest layer under ``modules``, and the names of all layers of that size.

    A layer is a tensor, a module without children, or a module whose class is in ``no_split_module_classes``.
    """
    largest: int | float = 0
    names: list[str] = []
    for name in _layers(modules, no_split_module_classes):
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def _layers(modules: Sequence[Named], no_split: Collection[str]) -> Iterator[str]:
    for name, module in modules:
        inner = children_of(module, no_split)
        if inner:
            yield from _layers([(f"{name}.{child}", value) for child, value in inner], no_split)
        else:
            yield name


def children_of(module: nn.Module | torch.Tensor, no_split: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return the direct submodules of ``module``; none for a tensor and for a class in ``no_split``."""
    if not isinstance(module, nn.Module) or type(module).__name__ in no_split:
        return []
    return list(module.named_children())


def direct_parts(model: nn.Module) -> list[Named]:
    """Return the first-level entries of a device map of ``model``: own parameters, submodules, own buffers."""
    return [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int | float, tuple[int | float, list[str]]]:
    """Return the bytes of ``model`` and its `get_max_layer_size`, respecting transformers' ``_no_split_modules``."""
    sizes = compute_module_sizes(model)
    no_split = class_names(getattr(model, "_no_split_modules", None))
    return sizes[""], get_max_layer_size(direct_parts(model), sizes, no_split)


def class_names(names: str | Collection[str] | None) -> list[str]:
    """Return one name, several or none, as a list."""
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


# Estimates by type, computed from sizes alone: for models on the meta device too.

_FULL = ("float32", "no")
_HALF = ("float16", "bfloat16", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of a model in one type; ``training`` is by part, or ``None`` for a type without training."""

    dtype: str
    largest_layer: int
    total: int
    training: dict[str, int] | None

    @property
    def training_peak(self) -> int | None:
        """Bytes of the largest part of a training step, which must fit in addition to the activations."""
        return None if self.training is None else max(self.training.values())


def estimate_model(model: nn.Module, dtypes: Iterable[str] = ("float32", "float16", "int8", "int4")) -> list[Estimate]:
    """Return an `Estimate` per type for ``model``, assuming float32 parameters.

    Raises `ArgumentError` for an unknown type.
    """
    total, (largest, _) = calculate_maximum_sizes(model)
    estimates = []
    for dtype in dtypes:
        share = dtype_byte_size(dtype) / 4
        training = estimate_training_usage(int(total), dtype) if dtype in _FULL + _HALF else None
        estimates.append(
            Estimate(dtype=dtype, largest_layer=int(largest * share), total=int(total * share), training=training)
        )
    return estimates


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes of a training step with Adam at batch size 1, for a float32 model of ``bytes``.

    The parts are ``model``, ``gradients``, ``optimizer`` (two averages) and ``step`` (while the step is taken).
    In mixed precision the weights stay float32 and gradients exist in both types. Raises `ArgumentError` for a
    negative size, another precision, or an ``msamp_config``, since MS-AMP is not supported.
    """
    if bytes < 0:
        raise ArgumentError(f"bytes={bytes} is negative")
    if msamp_config is not None:
        raise ArgumentError(
            f"msamp_config={msamp_config!r}: MS-AMP is not supported. Remove it to estimate mixed_precision "
            f"{mixed_precision!r} without it"
        )
    one_of(mixed_precision, _FULL + _HALF, source="mixed_precision")
    if mixed_precision in _FULL:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
