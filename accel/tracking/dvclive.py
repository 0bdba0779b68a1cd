"""DVCLive: files that DVC versions with the code."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import GeneralTracker, on_main_process, plain, scalars, warn_skipped


class DVCLiveTracker(GeneralTracker):
    """A tracker that logs with ``live``, or with a new `dvclive.Live` from ``kwargs``; ``run_name`` is ignored."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.live = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Create the ``Live`` if none was passed."""
        from dvclive import Live

        if self.live is None:
            self.live = Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `dvclive.Live`."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``values`` to ``params.yaml``."""
        self.live.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text at ``step``, and count a step; ``kwargs`` go to `dvclive.Live.log_metric`."""
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for name, value in scalars(values).items():
            if Metric.could_log(value):
                self.live.log_metric(name, value, **kwargs)
            else:
                warn_skipped(self.name, name, value, "numbers and text")
        self.live.next_step()

    @on_main_process
    def finish(self) -> None:
        """End the ``Live``."""
        self.live.end()
