"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import RunTracker, on_main_process, scalars

_OFFLINE = ("offline", "dryrun", "disabled")


class WandBTracker(RunTracker):
    """A tracker that logs to a run of ``wandb``; ``.run`` is the run.

    ``run_name`` is its project, ``kwargs`` go to `wandb.init`. A process of wandb's own sends the records, so
    that `log` does not wait for the server.
    """

    name = "wandb"
    offline = "WANDB_MODE=offline logs to files that `wandb sync` sends later"

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Merge ``values`` into the run's configuration."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values`` of any type that wandb supports; ``kwargs`` go to the run's ``log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each value, a list of arrays (H × W × C) or PIL images."""
        import wandb

        self.log({name: [wandb.Image(image) for image in images] for name, images in values.items()}, step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, from ``columns`` and rows of ``data`` or from a pandas ``dataframe``."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)

    def server(self) -> str | None:
        """Return the server if the run is online and wandb has no settings or proxy of its own, else None."""
        import wandb

        settings = wandb.setup().settings
        mode = self.init_kwargs.get("mode") or settings.mode
        is_custom = "settings" in self.init_kwargs or settings.http_proxy or settings.https_proxy
        return None if is_custom or mode in _OFFLINE else str(settings.base_url)

    def is_outage(self, error: BaseException) -> bool:
        """Return True if wandb could not reach its server; a rejected key is no outage."""
        from wandb.errors import AuthenticationError, CommError

        return isinstance(error, CommError) and not isinstance(error, AuthenticationError)
