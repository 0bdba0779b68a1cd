"""Notification of ended jobs: one session with the login node stays open for all jobs of a target."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..errors import SchedulerError
from .native_id import Native

if TYPE_CHECKING:
    from ..hosts.session import Session

_LIFETIME_S = 600.0  # of a session, which then ends even if its client is gone
_READ_SLACK_S = 60.0
_RETRY_S = 5.0  # after a session that ended early, before the next


class Watch:
    """A watch of jobs through one session. Thread-safe."""

    def __init__(self, open_session: Callable[[float], AbstractContextManager[Session]]) -> None:
        """`open_session`: opens a session that ends by itself after that many seconds."""
        self._open_session = open_session
        self._lock = threading.Lock()
        self._events: dict[Native, threading.Event] = {}
        self._waiting: list[Native] = []
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._not_before = 0.0

    def wait(self, native: Native, timeout_s: float) -> bool:
        """Wait until the job has left its result or Slurm has ended it. Return False on a timeout."""
        with self._lock:
            if native not in self._events:
                self._events[native] = threading.Event()
                self._waiting.append(native)
                self._send()
            if self._thread is None and time.monotonic() >= self._not_before:
                self._thread = threading.Thread(target=self._run, name="watching the login node", daemon=True)
                self._thread.start()
            event = self._events[native]
        return event.wait(timeout_s)

    def _run(self) -> None:
        started_at = time.monotonic()
        with contextlib.suppress(SchedulerError):  # polls report it
            self._read_events()
        with self._lock:
            self._thread = self._session = None
            early = time.monotonic() - started_at < _LIFETIME_S
            self._not_before = time.monotonic() + _RETRY_S if early else 0.0
            self._waiting = list(self._events)

    def _read_events(self) -> None:
        with self._open_session(_LIFETIME_S) as session:
            with self._lock:
                self._session = session
                self._send()
            while line := session.read_line(_LIFETIME_S + _READ_SLACK_S):
                job_id = line.decode("ascii", "replace").strip()
                with self._lock:
                    # A caller whose job still runs after all waits again.
                    for native in [native for native in self._events if native.job_id == job_id]:
                        self._events.pop(native).set()

    def _send(self) -> None:
        if self._session is None:
            return
        with contextlib.suppress(SchedulerError):  # the reader sees it too
            self._session.write("".join(f"{native.job_id} {native.slurm}\n" for native in self._waiting).encode())
        self._waiting.clear()
