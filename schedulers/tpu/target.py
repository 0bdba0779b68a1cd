"""The TPU target: an existing slice, or one that is created for each job."""

from __future__ import annotations

from ..target import TargetContext
from . import options as tpu_options
from .slice_target import SliceTarget


class TpuTarget(SliceTarget):
    """A factory for the target that the options describe."""

    def __new__(cls, context: TargetContext) -> SliceTarget:  # type: ignore[misc]
        if tpu_options.creates(context.options):
            from .created import CreatedSlices

            return CreatedSlices(context)
        return super().__new__(cls)
