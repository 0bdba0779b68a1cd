"""Plain data from files and hosts, checked before it is used: JSON with finite numbers, and values of the right type.

The small checks need no validator: `accel list` reads thousands of records, and importing msgspec costs half a Python
start. `convert` has msgspec check whole documents.
"""

from __future__ import annotations

import json
import threading
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_ONE_AT_A_TIME = threading.Lock()
_LATEST = 253_402_300_799  # the last second of the year 9999: no calendar goes further
_LARGEST = 2**53  # the integers that every JSON reader keeps exact


def convert(data: Any, schema: type[T], *, strict: bool = True) -> T:
    """`data` as `schema` describes it. Raises msgspec.ValidationError, which is a ValueError.

    Under a lock: msgspec 0.22 crashes the interpreter where threads convert to a class for the first time together,
    which is what submits at the same time do.
    """
    import msgspec

    with _ONE_AT_A_TIME:
        try:
            return msgspec.convert(data, schema, strict=strict)
        except UnicodeEncodeError as error:  # a key with a lone surrogate
            raise msgspec.ValidationError(str(error)) from None


def parse_json(text: str | bytes) -> Any:
    """The JSON document in `text`, UTF-8 if it is bytes. Raises ValueError, also for NaN, infinities (`1e999` is one)
    and for what is nested too deep."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def as_text(value: object, name: str) -> str:
    """Raises ValueError for what is not text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not text")
    return value


def as_whole(value: object, name: str, least: int = 0) -> int:
    """Raises ValueError for what is not a whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ValueError(f"{name} is {_shown(value)}, not a whole number from {least} on")
    return value


def as_moment(value: object, name: str) -> float:
    """Raises ValueError for what is not a time in seconds since the epoch that a calendar knows."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _LATEST:
        raise ValueError(f"{name} is {_shown(value)}, not a time in seconds since 1970")
    return float(value)


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, (dict, list)) else repr(value)[:40]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _finite(literal: str) -> float:
    number = float(literal)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{literal} is too large for a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
