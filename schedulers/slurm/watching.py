"""Who is told when a job ends: one conversation with the login node that stays open, for all jobs of a target."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING

from ..errors import SchedulerError

if TYPE_CHECKING:
    from ..remote.session import Session
    from .cluster import Login

_LIFETIME_S = 600.0  # of a conversation: one whose client was cut off ends by itself
_LATE_S = 60.0
_AGAIN_S = 5.0  # before a conversation that failed is tried again


class Watch:
    """Safe to use from several threads."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._lock = threading.Lock()
        self._news: dict[str, threading.Event] = {}
        self._waiting: list[str] = []
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._not_before = 0.0

    def wait(self, job_id: str, timeout_s: float) -> bool:
        """Until the job has left its result on the cluster; False when the time is over."""
        with self._lock:
            if job_id not in self._news:
                self._news[job_id] = threading.Event()
                self._waiting.append(job_id)
                self._send()
            if self._thread is None and time.monotonic() >= self._not_before:
                self._thread = threading.Thread(target=self._run, name="watching the login node", daemon=True)
                self._thread.start()
            news = self._news[job_id]
        return news.wait(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(SchedulerError):  # polls find out, and say so
            self._listen()
        with self._lock:
            self._thread = self._session = None
            self._not_before = time.monotonic() + _AGAIN_S
            self._waiting = [job_id for job_id, news in self._news.items() if not news.is_set()]

    def _listen(self) -> None:
        from ..remote.files import program_loader
        from .cluster import host_programs

        program = host_programs()
        argv = [self._login.python, "-I", "-S", "-c", program_loader(program)]
        request = json.dumps({"root": self._login.root, "watch_s": _LIFETIME_S}).encode()
        with self._login.remote.open(argv) as session:
            session.write(program + request + b"\n")
            with self._lock:
                self._session = session
                self._send()
            while line := session.read_line(_LIFETIME_S + _LATE_S):
                with self._lock:
                    news = self._news.get(line.decode("ascii", "replace").strip())
                if news is not None:
                    news.set()

    def _send(self) -> None:
        if self._session is None:
            return
        with contextlib.suppress(SchedulerError):  # whoever reads finds out
            self._session.write("".join(f"{job_id}\n" for job_id in self._waiting).encode())
        self._waiting.clear()
