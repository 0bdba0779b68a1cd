"""Checkpoints: written whole or not at all, verified when read, never run as code."""

from __future__ import annotations

from accel.checkpoint.control import CheckpointControl
from accel.checkpoint.writer import Checkpoints

__all__ = ["CheckpointControl", "Checkpoints"]
