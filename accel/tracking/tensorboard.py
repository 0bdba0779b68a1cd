"""TensorBoard: event files under ``<logging_dir>/<run_name>``."""

from __future__ import annotations

import os
import time
from typing import Any

from accel.tracking.base import GeneralTracker, is_number, on_main_process, plain, scalars, warn_skipped

_HYPERPARAMETERS = (bool, int, float, str)


class TensorBoardTracker(GeneralTracker):
    """A tracker that writes with `torch.utils.tensorboard.SummaryWriter`; ``.writer`` is that object.

    ``kwargs`` go to the writer. Without the package ``tensorboard``, that of ``tensorboardX`` is used.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir_param = logging_dir
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open an event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter  # type: ignore[no-redef]
        self.logging_dir = os.path.join(self.logging_dir_param, self.run_name)
        self.writer: Any = SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``values`` as hyperparameters, and as ``<time>/hparams.yml`` in the event file's directory.

        TensorBoard accepts numbers and text: anything else is converted with ``str``.
        """
        import yaml

        config = plain(values)
        hparams = {name: value if isinstance(value, _HYPERPARAMETERS) else str(value) for name, value in config.items()}
        self.writer.add_hparams(hparams, metric_dict={})
        self.writer.flush()
        directory = os.path.join(self.logging_dir, str(time.time()))
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, "hparams.yml"), "w", encoding="utf-8") as file:
            yaml.safe_dump(config, file, allow_unicode=True, sort_keys=False)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, text as text and a dict of numbers as scalars of one chart.

        ``kwargs`` go to `add_scalar`, `add_text` or `add_scalars`.
        """
        for name, value in scalars(values).items():
            if is_number(value):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                warn_skipped(self.name, name, value, "numbers, text and dicts of numbers")
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write each value, a batch of images (N × C × H × W, or as in ``dataformats``), with `add_images`."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Flush and close the event file."""
        self.writer.close()
