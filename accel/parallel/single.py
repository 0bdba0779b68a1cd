"""One process: nothing is distributed."""

from __future__ import annotations

from accel.parallel.base import Strategy


class Single(Strategy):
    """The script's own model, on this process's device."""
