"""The common base of trackers whose package returns a run object with a configuration."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import GeneralTracker, on_main_process


class RunTracker(GeneralTracker):
    """Base of a tracker whose ``start`` sets ``.run``, an object with ``config`` and ``finish``.

    ``run_name`` is the package's project; ``kwargs`` go to the package's function that begins a run.
    """

    requires_logging_directory = False
    main_process_only = False
    run: Any

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The package's run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Merge ``values`` into the run's configuration."""
        self.run.config.update(values)

    @on_main_process
    def finish(self) -> None:
        """Send what is left and end the run."""
        self.run.finish()
