"""The TPU target: an existing slice, or one that is created for each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import SchedulerError, SpecError, Unreachable
from ..hosts.jobs.native_id import Native
from ..job import Status
from ..target import TargetContext, require_answers
from . import options as tpu_options
from . import slices
from .created import CreatedSlices
from .slice_target import SliceTarget


class TpuTarget(SliceTarget):
    """A target on an existing slice. For options that describe a slice to create, this makes a CreatedSlices."""

    def __new__(cls, context: TargetContext) -> SliceTarget:  # type: ignore[misc]
        return CreatedSlices(context) if tpu_options.creates(context.options) else super().__new__(cls)

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Poll the hosts. Jobs whose hosts do not respond have the slice's own state."""
        try:
            return super().poll(native_ids)
        except Unreachable as error:
            silent = dict(error.silent or {})
            status = self._status_if_over() if silent else None
            if status is None:
                raise
            statuses = dict(error.answers) | {native_id: status for native_id in silent if self._is_mine(native_id)}
            return require_answers(statuses, {key: why for key, why in silent.items() if key not in statuses})

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

    def _is_mine(self, native_id: str) -> bool:
        try:
            return all(host.name.startswith(f"{self._options.name}-w") for host in Native.parse(native_id).hosts)
        except SpecError:
            return False
