"""msgspec's conversion of plain data, for several threads at a time."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

T = TypeVar("T")

_ONE_AT_A_TIME = threading.Lock()


def convert(data: Any, schema: type[T], *, strict: bool = True) -> T:
    """`data` as `schema` describes it. Raises msgspec.ValidationError.

    Under a lock: msgspec 0.22 crashes the interpreter where threads convert to a class for the first time together,
    which is what submits at the same time do.
    """
    import msgspec

    with _ONE_AT_A_TIME:
        return msgspec.convert(data, schema, strict=strict)
