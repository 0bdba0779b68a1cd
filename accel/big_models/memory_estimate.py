"""Estimates of a model's memory for inference and training by type; the model may be on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from accel.big_models.sizes import calculate_maximum_sizes, dtype_byte_size
from accel.errors import ArgumentError, one_of

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
    found = []
    for dtype in dtypes:
        share = dtype_byte_size(dtype) / 4
        known = estimate_training_usage(int(total), dtype) if dtype in _FULL + _HALF else None
        found.append(
            Estimate(dtype=dtype, largest_layer=int(largest * share), total=int(total * share), training=known)
        )
    return found


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
            f"msamp_config={msamp_config!r}: MS-AMP is not supported; leave it out, and mixed_precision "
            f"{mixed_precision!r} is estimated without it"
        )
    one_of(mixed_precision, _FULL + _HALF, what="mixed_precision")
    if mixed_precision in _FULL:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
