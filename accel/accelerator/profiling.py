"""The part of `Accelerator` that runs `torch.profiler`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accel.accelerator.run import Part
from accel.plugins import ProfileKwargs

if TYPE_CHECKING:
    from torch.profiler import profile

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


class ProfileControl(Part):
    """The part of `Accelerator` that profiles."""

    profile_handler: ProfileKwargs | None = None

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[profile]:
        """Profile the block with ``profile_handler``, by default the one given to `Accelerator`; yield the profiler.

        With ``output_trace_dir`` every process writes ``profile_<rank>.json`` there if the block ends without an
        error, and waits until all have.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        os.makedirs(handler.output_trace_dir, exist_ok=True)
        name = PROFILE_PATTERN_NAME.format(suffix=self.state.process_index)
        profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
        self.state.wait_for_everyone()
