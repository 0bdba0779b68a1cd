"""Waiting for what comes true by itself: by looking again, never by the clock alone."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    """Returns once the condition holds; fails, naming it, where that takes longer than any machine should need."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
