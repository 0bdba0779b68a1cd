from __future__ import annotations

from .lines import gpus, somewhere

__all__ = ["gpus", "somewhere"]
