"""News of jobs: requests that wait for a job to change are woken when its row does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Changes:
    """The requests that wait for jobs to change. `notify` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, list[_Waiter]] = {}

    @property
    def awaited(self) -> bool:
        """True while a request waits."""
        return bool(self._waiters)

    @contextlib.contextmanager
    def waiting(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the job. Enter this before reading the job."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.setdefault(job_id, []).append(waiter)
        try:
            yield waiter[1]
        finally:
            with self._lock:
                self._waiters[job_id].remove(waiter)
                if not self._waiters[job_id]:
                    del self._waiters[job_id]

    def notify(self, job_id: str) -> None:
        """Wake the requests that wait for this job."""
        with self._lock:
            _wake(self._waiters.get(job_id, ()))

    def notify_all(self) -> None:
        """Wake all waiting requests."""
        with self._lock:
            for waiters in self._waiters.values():
                _wake(waiters)


def _wake(waiters: Iterable[_Waiter]) -> None:
    for loop, event in waiters:
        loop.call_soon_threadsafe(event.set)
