"""Trackio: a local database, or a Space on the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import RunTracker, on_main_process, scalars


class TrackioTracker(RunTracker):
    """A tracker that logs to a run of ``trackio``; ``.run`` is the run.

    ``run_name`` is its project; ``kwargs`` go to `trackio.init`.
    """

    name = "trackio"
    offline = "without space_id and server_url it logs to files under TRACKIO_DIR"

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` go to the run's ``log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is left and end the run."""
        import trackio
        from trackio import context_vars

        # Trackio's own function also resets the current run, which Trackio would otherwise finish again at exit.
        (trackio if context_vars.current_run.get() is self.run else self.run).finish()
