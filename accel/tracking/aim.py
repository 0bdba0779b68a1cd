"""Aim: a repository in the logging directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from accel.tracking.base import GeneralTracker, on_main_process, plain, scalars, warn_skipped


class AimTracker(GeneralTracker):
    """A tracker that logs to a run of ``aim`` in the repository ``logging_dir``; ``.writer`` is the run.

    ``kwargs`` go to `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin the run, creating the repository if needed."""
        from aim import Run

        self.writer: Any = Run(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The ``aim`` run."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store ``values`` as the run's ``hparams``."""
        self.writer["hparams"] = plain(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Track numbers, text, Aim's own objects and lists of these; ``kwargs`` go to `aim.Run.track`.

        Values in a dict are tracked under the dict's name, a slash and their own.
        """
        import aim

        for name, value in _flat(scalars(values)):
            try:
                self.writer.track(aim.Text(value) if isinstance(value, str) else value, name=name, step=step, **kwargs)
            except ValueError:
                warn_skipped(self.name, name, value, "numbers, text and Aim's own objects")

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Track each value, an array or PIL image, or a tuple of one and its caption.

        ``kwargs["aim_image"]`` goes to `aim.Image`, ``kwargs["track"]`` to `aim.Run.track`.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            aim_image = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(aim_image, name=name, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value
