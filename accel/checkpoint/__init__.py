"""Checkpoints: written atomically, verified when read, never executed as code."""

from __future__ import annotations

from accel.checkpoint.weights import clean_state_dict_for_safetensors, load, save
from accel.checkpoint.writer import Checkpoints

__all__ = ["Checkpoints", "clean_state_dict_for_safetensors", "load", "save"]
