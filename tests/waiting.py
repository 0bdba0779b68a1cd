"""Waiting for what comes true by itself: by looking again, never by the clock alone."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S, _LONGEST_S, _GROWTH = 0.02, 0.25, 1.5


def comes(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition holds within this time. Looks ever less often: a look may cost a process or a request."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(_LONGEST_S, pause * _GROWTH)
    return True


def until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Returns once the condition holds; fails, naming it, where that takes longer than any machine should need."""
    assert comes(condition, seconds), f"not within {seconds:g} s: {what}"
