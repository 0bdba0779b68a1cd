"""Logged values as plain numbers and text: tensors, numpy scalars and arrays become Python's own values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_PLAIN = (int, float, str, bool, type(None))
_said: set[tuple[str, str]] = set()


def scalar(value: Any) -> Any:
    """Return the number in a tensor, array or numpy scalar of one element; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # numpy's float64 among others
        return float(value)
    item = getattr(value, "item", None)
    if item is None or _count(value) != 1:
        return value
    number = item()
    return number if type(number) in _PLAIN else value


def _count(value: Any) -> int | None:
    numel = getattr(value, "numel", None)
    count = numel() if callable(numel) else getattr(value, "size", None)
    return count if isinstance(count, int) else None


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with `scalar` applied to each, and to each value of a dict in them."""
    return {
        name: {inner: scalar(one) for inner, one in value.items()} if isinstance(value, Mapping) else scalar(value)
        for name, value in values.items()
    }


def plain(value: Any) -> Any:
    """Return ``value`` as dicts with text keys, lists, numbers, text and ``None`` only.

    Tensors and arrays become nested lists, sets and tuples become lists, and anything else its ``str``.
    """
    value = scalar(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (str, bool)):  # an enum's member that is also text
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=str)
    tolist = getattr(value, "tolist", None)
    return plain(tolist()) if callable(tolist) else str(value)


def is_number(value: Any) -> bool:
    """Return True if ``value`` is an int, a float or a bool."""
    return isinstance(value, (int, float))


def leave_out(tracker: str, name: str, value: Any, takes: str) -> None:
    """Warn, once per tracker and name, that ``value`` is not logged because the tracker only accepts ``takes``."""
    if (tracker, name) not in _said:
        _said.add((tracker, name))
        logger.warning("tracker %r takes %s: %r is left out (%s)", tracker, takes, name, type(value).__name__)


def table_rows(
    tracker: str, columns: list[str] | None, data: list[list[Any]] | None, dataframe: Any
) -> list[list[Any]] | Any:
    """Return the rows of a table, ``columns`` first, or ``dataframe``. Raises `ArgumentError` without data."""
    if dataframe is not None:
        return dataframe
    if data is None:
        from accel.errors import ArgumentError

        raise ArgumentError(f"log_table of tracker {tracker!r} needs data=… or dataframe=…")
    return [columns, *data] if columns else data
