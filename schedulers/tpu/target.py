"""The TPU target: an existing slice, or one that is created for each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import SchedulerError, Unreachable
from ..job import Status
from ..target import TargetContext
from . import options as tpu_options
from . import slices
from .created import CreatedSlices
from .slice_target import SliceTarget


class TpuTarget(SliceTarget):
    """A target on an existing slice. For options that describe a slice to create, this makes a CreatedSlices."""

    def __new__(cls, context: TargetContext) -> SliceTarget:  # type: ignore[misc]
        tpu_options.check(context.options, context.name)
        return CreatedSlices(context) if tpu_options.creates(context.options) else super().__new__(cls)

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Poll the hosts. Jobs whose hosts do not respond have the slice's own state."""
        try:
            return super().poll(native_ids)
        except Unreachable as error:
            status = self._status_if_over()
            if status is None:
                raise
            return {**error.answers, **dict.fromkeys(error.silent or (), status)}

    def cancel(self, native_id: str) -> None:
        """Cancel the job. Do nothing if the slice is gone."""
        try:
            super().cancel(native_id)
        except Unreachable:
            if self._status_if_over() is None:
                raise

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        """Return where jobs run; nothing if the slice is gone."""
        running = super().running(jobs)
        return {} if running and self._status_if_over() is not None else running

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Remove the jobs' directories. Report nothing if the slice is gone."""
        lines = super().clear(jobs)
        return [] if lines and self._status_if_over() is not None else lines

    def _status_if_over(self) -> Status | None:
        """Return how jobs on unreachable hosts have ended, or None if that is unknown."""
        try:
            return slices.status_if_over(self._slice(), self._options)
        except SchedulerError:
            return None
