"""One save that runs in a background thread until `wait`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from accel.logging import get_logger

logger = get_logger(__name__)


class Background:
    """A runner of one task at a time. An exception is logged at once and raised by `wait`.

    The thread is no daemon, so the interpreter does not exit before the task is done.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """True if a task is running, or has failed and `wait` has not yet raised its error."""
        return self._thread is not None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work`` in a thread. No other task may be running: call `wait` first."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error
                logger.error(str(error), main_process_only=False)

        self._thread = threading.Thread(target=run, name="accel-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until no task is running. Raises, once, what the task raised."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
