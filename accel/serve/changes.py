"""News of jobs: requests that wait for a job to change are woken when its row does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator


class Changes:
    """The requests that wait for jobs to change. `notify` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    @property
    def awaited(self) -> bool:
        """True while a request waits."""
        return bool(self._waiters)

    @contextlib.contextmanager
    def waiting(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the job. Enter this before reading the job."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.setdefault(job_id, set()).add(waiter)
        try:
            yield waiter[1]
        finally:
            with self._lock:
                self._waiters[job_id].remove(waiter)
                if not self._waiters[job_id]:
                    del self._waiters[job_id]

    def notify(self, job_id: str | None = None) -> None:
        """Wake the requests that wait for this job, or without one all requests."""
        with self._lock:
            waiters = self._waiters.values() if job_id is None else [self._waiters.get(job_id, set())]
            for loop, event in itertools.chain.from_iterable(waiters):
                loop.call_soon_threadsafe(event.set)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; return False if it is not set within that time."""
    try:
        return await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:  # on Python 3.10, not the built-in one
        return False
