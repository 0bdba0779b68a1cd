"""The arithmetic of ``split_between_processes``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from accel.errors import ArgumentError
from accel.pytree import honor_type

_TEXT = (str, bytes)  # one value for every process, as a prompt


def bounds(length: int, index: int, parts: int) -> tuple[int, int]:
    """Return the start and end of part ``index`` of ``parts``; the first parts may be longer by one."""
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def share_of(inputs: Any, index: int, parts: int, padded: bool) -> Any:
    """Return part ``index`` of a sequence, tensor, `datasets.Dataset` or dict of these; a text stays whole.

    See `PartialState.split_between_processes`. Raises `ArgumentError` for inputs that cannot be split or padded.
    """
    if parts == 1 or isinstance(inputs, _TEXT):
        return inputs
    if isinstance(inputs, Mapping):
        _check_lengths(inputs)
        return {key: share_of(value, index, parts, padded) for key, value in inputs.items()}
    length = _length(inputs)
    start, end = bounds(length, index, parts)
    missing = -(-length // parts) - (end - start) if padded else 0
    if _is_dataset(inputs):
        # An empty share (fewer items than processes) repeats the last item of all.
        return inputs.select([*range(start, end), *[(end if end > start else length) - 1] * missing])
    try:
        share = inputs[start:end]
    except (TypeError, KeyError):
        raise ArgumentError(
            f"split_between_processes cannot split a {type(inputs).__name__}: it has no slices; pass a list"
        ) from None
    if missing == 0 or length == 0:
        return share
    return _repeat_last(inputs, share, start, end, missing)


def _length(inputs: Any) -> int:
    try:
        return len(inputs)
    except TypeError:
        raise ArgumentError(
            f"split_between_processes cannot split a {type(inputs).__name__}: it has no length"
        ) from None


def _is_dataset(inputs: Any) -> bool:
    datasets = sys.modules.get("datasets")  # if not imported, ``inputs`` is not one
    return datasets is not None and isinstance(inputs, datasets.Dataset)


def _check_lengths(inputs: Mapping[Any, Any]) -> None:
    lengths = {key: _length(value) for key, value in inputs.items() if not isinstance(value, _TEXT)}
    if len(set(lengths.values())) > 1:
        raise ArgumentError(f"split_between_processes needs values of one length, got {lengths}")


def _repeat_last(inputs: Any, share: Any, start: int, end: int, missing: int) -> Any:
    last = slice(end - 1, end) if end > start else slice(len(inputs) - 1, len(inputs))
    if isinstance(inputs, torch.Tensor):
        return torch.cat([share, inputs[last].repeat(missing, *[1] * (inputs.ndim - 1))])
    if isinstance(inputs, (list, tuple)):
        return honor_type(share, iter([*share, *list(inputs[last]) * missing]))
    if type(inputs).__module__ == "numpy":
        return inputs[[*range(start, end), *[last.start] * missing]]
    raise ArgumentError(f"split_between_processes(apply_padding=True) cannot pad a {type(inputs).__name__}")
