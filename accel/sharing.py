"""Which part of a sequence belongs to which process: the arithmetic of ``split_between_processes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel.errors import ArgumentError
from accel.nested import honor_type


def bounds(length: int, index: int, parts: int) -> tuple[int, int]:
    """First and past-the-last position of part ``index`` of ``parts``; the first ones are larger, by one."""
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def share_of(inputs: Any, index: int, parts: int, padded: bool) -> Any:
    """Return part ``index`` of a sequence, tensor or dict of these; see `PartialState.split_between_processes`."""
    if parts == 1:
        return inputs
    if isinstance(inputs, Mapping):
        _check_lengths(inputs)
        return {key: share_of(value, index, parts, padded) for key, value in inputs.items()}
    try:
        length = len(inputs)
    except TypeError:
        raise ArgumentError(
            f"split_between_processes cannot split a {type(inputs).__name__}: it has no length"
        ) from None
    start, end = bounds(length, index, parts)
    share = inputs[start:end]
    missing = -(-length // parts) - (end - start)
    if not padded or missing == 0 or length == 0:
        return share
    return _repeat_last(inputs, share, start, end, missing)


def _check_lengths(inputs: Mapping[Any, Any]) -> None:
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"split_between_processes needs values of one length, got {lengths}")


def _repeat_last(inputs: Any, share: Any, start: int, end: int, missing: int) -> Any:
    # An empty share (fewer items than processes) repeats the last item of all.
    last = slice(end - 1, end) if end > start else slice(len(inputs) - 1, len(inputs))
    if isinstance(inputs, torch.Tensor):
        return torch.cat([share, inputs[last].repeat(missing, *[1] * (inputs.ndim - 1))])
    if isinstance(inputs, (list, tuple)):
        return honor_type(share, iter([*share, *list(inputs[last]) * missing]))
    return share + inputs[last] * missing
