"""SwanLab: numbers, text, images and types of its own, in the cloud or in files."""

from __future__ import annotations

from typing import Any

from accel.tracking.base import RunTracker, on_main_process, scalars, warn_skipped


class SwanLabTracker(RunTracker):
    """A tracker that logs to a run of ``swanlab``; ``.run`` is the run.

    ``run_name`` is its project; ``kwargs`` go to `swanlab.init`.
    """

    name = "swanlab"
    offline = "SWANLAB_MODE=offline (or local) logs to files under swanlog"

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        import swanlab

        self.run = swanlab.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``: numbers, text and swanlab's own types; ``kwargs`` go to the run's ``log``."""
        import swanlab

        accepted = {}
        for name, value in scalars(values).items():
            if isinstance(value, list) and all(isinstance(item, (int, float, str)) for item in value):
                warn_skipped(self.name, name, value, "numbers, text and swanlab's own types")
            else:
                accepted[name] = swanlab.Text(value) if isinstance(value, str) else value
        self.run.log(accepted, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log each value, a list of arrays (H × W × C) or PIL images."""
        import swanlab

        self.log({name: [swanlab.Image(image) for image in images] for name, images in values.items()}, step, **kwargs)

    def server(self) -> str | None:
        """Return the server if the run is online and has no settings of its own, else None."""
        import swanlab

        if "settings" in self.init_kwargs:
            return None
        settings = swanlab.Settings()
        return str(settings.api_host) if (self.init_kwargs.get("mode") or settings.mode) == "online" else None
