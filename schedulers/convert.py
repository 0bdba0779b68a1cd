"""Validation of plain data from files and hosts: JSON with finite numbers, and values of the right type.

The small checks do without msgspec: `accel list` reads thousands of records, and importing it costs half a
Python start. `convert` validates whole documents with it.
"""

from __future__ import annotations

import json
from _thread import allocate_lock  # threading.Lock, without the cost of importing threading
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_CONVERT_LOCK = allocate_lock()
_LATEST = 253_402_300_799  # the last second of the year 9999: no calendar goes further
_LARGEST = 2**53  # the integers that every JSON reader keeps exact


def convert(data: Any, schema: type[T], *, strict: bool = True) -> T:
    """Convert `data` to `schema`. Raises msgspec.ValidationError, which is a ValueError.

    Holds a lock: msgspec 0.22 crashes the interpreter if threads convert to a class for the first time at once,
    as concurrent submits do.
    """
    import msgspec

    with _CONVERT_LOCK:
        try:
            return msgspec.convert(data, schema, strict=strict)
        except UnicodeEncodeError as error:  # a key with a lone surrogate
            raise msgspec.ValidationError(str(error)) from None


def parse_json(text: str | bytes) -> Any:
    """Parse the JSON document in `text` (bytes must be UTF-8).

    Raises ValueError, also for NaN, infinities (`1e999` is one) and too deep nesting.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def as_text(value: object, name: str) -> str:
    """Return `value`, or raise ValueError unless it is text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_format_value(value)}, not text")
    return value


def as_integer(value: object, name: str, least: int = 0) -> int:
    """Return `value`, or raise ValueError unless it is an integer from `least` to 2**53."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ValueError(f"{name} is {_format_value(value)}, not a whole number of {least} or more")
    return value


def as_timestamp(value: object, name: str) -> float:
    """Return `value` as a float, or raise ValueError unless it is in seconds since the epoch, before the year 10000."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _LATEST:
        raise ValueError(f"{name} is {_format_value(value)}, not a time in seconds since 1970")
    return float(value)


def _format_value(value: object) -> str:
    return type(value).__name__ if isinstance(value, (dict, list)) else repr(value)[:40]


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(literal: str) -> float:
    number = float(literal)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{literal} is too large for a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite)
