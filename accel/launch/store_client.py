"""A TCPStore client with a timeout.

torch's own client blocks for 15 minutes when the store's machine vanishes, and handles no signals meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SLICE_S = 0.1
_LAST_WORD_S = 1.0


class StoreSilent(RuntimeError):
    """The store did not respond in time. It is not queried again: its connection is in an unknown state."""


class Patience:
    """A store client that queries in a separate thread, so that the caller can give up.

    limit_s: the longest wait for a response; at most a second once `ending()`.
    """

    def __init__(self, limit_s: float, ending: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._ending = ending
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent_s: float | None = None

    def ask(self, question: Callable[[], T]) -> T:
        """Return the result of `question`, or raise its error. Raises StoreSilent."""
        if self._silent_s is not None:
            raise self._silence()
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer, name="store", daemon=True)
            self._thread.start()
        answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((question(), None))
            except BaseException as error:
                answers.put((None, error))

        self._asked.put(answer)
        began = time.monotonic()
        while True:
            try:
                value, error = answers.get(timeout=_SLICE_S)
            except queue.Empty:
                waited = time.monotonic() - began
                if waited > (min(_LAST_WORD_S, self._limit_s) if self._ending() else self._limit_s):
                    self._silent_s = waited
                    raise self._silence() from None
                continue
            if error is not None:
                raise error
            return value  # type: ignore[return-value]  # no error: it is there

    def _answer(self) -> None:
        while True:
            self._asked.get()()

    def _silence(self) -> StoreSilent:
        return StoreSilent(f"its store has not answered for {self._silent_s:.0f} s")
