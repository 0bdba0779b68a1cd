"""One process: nothing to spread."""

from __future__ import annotations

from accel.parallel.base import Strategy


class Single(Strategy):
    """The model is the script's own, on this process's device."""
