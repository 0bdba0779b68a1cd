"""News of jobs: requests that wait for a job to change are woken when its row does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Changes:
    """The requests that wait for jobs to change. `notify` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: set[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = set()

    @property
    def awaited(self) -> bool:
        """True while a request waits."""
        return bool(self._waiters)

    @contextlib.contextmanager
    def waiting(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change of the job. Enter this before reading the job."""
        waiter = (job_id, asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.add(waiter)
        try:
            yield waiter[2]
        finally:
            with self._lock:
                self._waiters.remove(waiter)

    def notify(self, job_id: str | None = None) -> None:
        """Wake the requests that wait for this job, or without one all requests."""
        with self._lock:
            for awaited_id, loop, event in self._waiters:
                if job_id is None or job_id == awaited_id:
                    loop.call_soon_threadsafe(event.set)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event; return False if it is not set within that time."""
    try:
        return await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:  # on Python 3.10, not the built-in one
        return False
