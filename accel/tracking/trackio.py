"""Trackio: a local database, or a Space on the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import GeneralTracker, on_main_process
from accel.tracking.values import scalars


class TrackioTracker(GeneralTracker):
    """Logs to a run of ``trackio``; ``run_name`` is its project; ``.run`` is the run.

    ``kwargs`` go to `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False
    offline = "without space_id and server_url it logs to files under TRACKIO_DIR"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import trackio

        self.run: Any = trackio.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``trackio`` run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Merge ``values`` into the run's configuration, which is stored with the first record."""
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``; ``kwargs`` go to the run's ``log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is left and end the run."""
        import trackio
        from trackio import context_vars

        # Trackio's own function also forgets the run, which it would otherwise finish again when Python ends.
        (trackio if context_vars.current_run.get() is self.run else self.run).finish()
