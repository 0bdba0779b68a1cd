"""Questions to a store on another machine, which may fall silent without a word: torch's client would wait for a
quarter of an hour, in a call in which no signal is handled."""

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
    """The store has not answered for too long. It is not asked again: its connection is in an unknown state."""


class Patience:
    """Asks from a thread of its own, so that the asking one can give up.

    limit_s: how long an answer may take; once `ending()`, a second.
    """

    def __init__(self, limit_s: float, ending: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._ending = ending
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent_s: float | None = None

    def ask(self, question: Callable[[], T]) -> T:
        """The answer, or what the question raises. Raises StoreSilent."""
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
