"""Comet."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import GeneralTracker, is_number, on_main_process, plain, scalars, warn_skipped

_SERVER = "https://www.comet.com"


class CometMLTracker(GeneralTracker):
    """A tracker that logs to an experiment of ``comet_ml``; ``.writer`` is the experiment.

    ``run_name`` is its project, ``kwargs`` go to `comet_ml.start`. The key comes from Comet's configuration file
    or ``COMET_API_KEY``.
    """

    name = "comet_ml"
    requires_logging_directory = False
    offline = "COMET_START_ONLINE=0 logs to an archive that `comet upload` sends later"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        # comet_ml.start came with 3.41.
        begin = getattr(comet_ml, "start", None) or comet_ml.Experiment
        self.writer: Any = begin(project_name=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log ``values`` as parameters."""
        self.writer.log_parameters(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, a dict of numbers as several, and text with `log_other`, which has no step.

        ``kwargs`` go to the experiment's function.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in scalars(values).items():
            if is_number(value):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                warn_skipped(self.name, name, value, "numbers, text and dicts of numbers")

    def server(self) -> str | None:
        """Return the server, or None if the experiment is offline."""
        from comet_ml.config import get_config

        config = get_config()
        online = self.init_kwargs.get("online", config["comet.start.online"])
        return str(config["comet.url_override"] or _SERVER) if online in (None, True) else None

    @on_main_process
    def finish(self) -> None:
        """Send or write what is left and end the experiment."""
        self.writer.end()
