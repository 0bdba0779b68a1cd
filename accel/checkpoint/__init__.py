"""Checkpoints: written whole or not at all, verified when read, never executed as code; not `Accelerator.save_state`
and its like (`accelerator/checkpoints.py`).
"""

from __future__ import annotations

from accel.checkpoint.weights import clean_state_dict_for_safetensors, load, save
from accel.checkpoint.writer import Checkpoints

__all__ = ["Checkpoints", "clean_state_dict_for_safetensors", "load", "save"]
