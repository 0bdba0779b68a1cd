"""One save that goes on beside training, in a thread, until somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from accel.logging import get_logger

logger = get_logger(__name__)


class Background:
    """Runs one piece of work at a time. What it raises is raised by `wait`, and logged at once.

    The interpreter does not end before the work has: the thread is no daemon.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way, or has failed and nobody has been told."""
        return self._thread is not None

    def start(self, work: Callable[[], None]) -> None:
        """Have ``work`` done. There must be none under way: `wait` first."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error
                logger.error(str(error), main_process_only=False)

        self._thread = threading.Thread(target=run, name="accel-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way; raises, once, what the work raised."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
