"""The objects of some jobs, of one kind, listed once and then watched: what the API server has, a moment later.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import SchedulerError, Unreachable
from ...printable import one_line
from .. import names
from .errors import ApiError, Forbidden, Gone

if TYPE_CHECKING:
    from .api import Api, Stream

_LIFETIME_S = (240, 300)  # of one watch: a server's own end of it comes later
_LATE_S = 60.0
_FIRST_S, _LAST_S = 0.2, 10.0  # before a server that does not answer is tried again
_REFUSED_S = 60.0
_MOST_JOBS = 100
_ALARMING_S = 2.0  # that a server has not answered: less is a connection that was lost

Object = dict[str, Any]

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """What is told of the objects, from the feed's own thread."""

    def replaced(self, objects: Sequence[Object]) -> None:
        """These there are, and no others."""

    def changed(self, change: str, thing: Object) -> None:
        """ADDED, MODIFIED or DELETED."""

    def troubled(self) -> None:
        """The server has not answered for a while, or refuses."""


class Feed:
    """A thread that keeps a sink up to date until `stop`. A daemon.

    jobs:    those of which it has the objects, by the values of their labels.
    live:    what the sink was told is what the server has, but for a moment.
    refused: why the server will not have it watched.
    """

    def __init__(self, api: Api, path: str, jobs: Collection[str], sink: Sink) -> None:
        self._api = api
        self._path = path
        self._wanted = frozenset(jobs)
        self._sink = sink
        self.jobs: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._alarmed = False
        self._live_at = 0.0
        self.live = False
        self.refused: SchedulerError | None = None
        self.settled = threading.Event()  # the first answer, whatever it was, has come
        self._thread = threading.Thread(target=self._run, name=f"watching {path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def select(self, jobs: Collection[str]) -> None:
        """Lists and watches the objects of these jobs instead."""
        with self._lock:
            self._wanted = frozenset(jobs)
            if self.live:
                self.settled.clear()
            stream = self._stream
        if stream is not None:
            stream.close()

    def covers(self, job: str) -> bool:
        """Return True where the sink knows what the server has of this job."""
        return self.live and job in self.jobs

    def stop(self) -> None:
        """Does not wait for the thread, which ends by itself."""
        self._stop.set()
        self.live = False
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self.settled.set()

    def _run(self) -> None:
        version: str | None = None
        failures = 0
        self._live_at = time.monotonic()
        while not self._stop.is_set():
            try:
                if version is None or self.jobs != self._wanted:
                    version = self._list()
                for told in self._watch(version):
                    version, failures = told, 0
            except Gone:
                version = None
            except Unreachable as error:
                failures += 1
                self._fail(error)
                pause = min(_LAST_S, _FIRST_S * 2 ** min(failures - 1, 10))
                self._stop.wait(pause * random.uniform(0.5, 1.5))
            except SchedulerError as error:
                version = None
                self._refuse(error)
                self._stop.wait(_REFUSED_S * random.uniform(0.8, 1.2))
            except Exception:
                # Whoever waits asks the server itself instead, and says what is wrong.
                logger.exception("watching %s failed", self._path)
                version = None
                self._refuse(ApiError(f"watching {self._path} failed"))
                self._stop.wait(_REFUSED_S)

    def _list(self) -> str:
        """Tells the sink all that there is; returns the version from which to watch."""
        objects: list[Object] = []
        version = ""
        wanted = self._wanted
        for answer in self._api.pages(self._path, _query(wanted)):
            objects += answer.get("items") or []
            version = str((answer.get("metadata") or {}).get("resourceVersion") or "0")
            if self._stop.is_set():
                break
        self._sink.replaced(objects)
        self.jobs = wanted
        return version

    def _watch(self, version: str) -> Iterator[str]:
        """One watch, to its end; the versions that the sink has been told of. The first comes when it is open."""
        lifetime = random.randint(*_LIFETIME_S)
        query = {
            **_query(self.jobs),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(lifetime),
        }
        stream = self._api.stream(self._path, query=query, idle_s=lifetime + _LATE_S)
        with self._lock:
            self._stream = stream
            current = self.jobs == self._wanted and not self._stop.is_set()
            if current:
                self.live, self.refused = True, None
                self.settled.set()
        try:
            if not current:
                return
            yield version
            rest = b""
            for chunk in stream:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        version = self._change(json.loads(line)) or version
                        yield version
        finally:
            with self._lock:
                self._stream = None
            stream.close()

    def _change(self, event: Object) -> str | None:
        thing, change = event.get("object") or {}, str(event.get("type"))
        if change == "ERROR":
            message = str(thing.get("message") or "the watch ended")
            if thing.get("code") == 410:
                raise Gone(message, status=410)
            # As when the server's own cache is not filled yet: to be tried again.
            raise Unreachable(f"{self._path}: {message}")
        if change != "BOOKMARK":
            self._sink.changed(change, thing)
        version = (thing.get("metadata") or {}).get("resourceVersion")
        return None if version is None else str(version)

    def _fail(self, error: Unreachable) -> None:
        if self.live:
            self.live, self._alarmed = False, False
            self._live_at = time.monotonic()
        logger.debug("watching %s: %s", self._path, error)
        if not self._alarmed and time.monotonic() - self._live_at > _ALARMING_S:
            self._alarmed = True
            self.settled.set()
            self._sink.troubled()

    def _refuse(self, error: SchedulerError) -> None:
        self.live = False
        if self.refused is None and isinstance(error, Forbidden):
            logger.warning("%s; it is asked for again and again instead", one_line(str(error)))
        self.refused = error
        self.settled.set()
        self._sink.troubled()


def _query(jobs: Collection[str]) -> dict[str, str]:
    """The selector is part of a URL: of very many jobs it is that of all."""
    return {"labelSelector": names.selector_of(jobs) if len(jobs) <= _MOST_JOBS else names.JOB_ID}


__all__ = ["Feed", "Object", "Sink"]
