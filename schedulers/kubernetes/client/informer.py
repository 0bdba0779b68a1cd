"""Objects of one job and one kind, listed once and then watched.

https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SchedulerError, Unreachable
from ...printable import one_line
from .errors import ApiError, Forbidden, Gone

if TYPE_CHECKING:
    from .api import Api, Stream

_LIFETIME_S = (240, 300)  # of one watch: a server's own end of it comes later
_LATE_S = 60.0
_FIRST_S, _LAST_S = 0.2, 10.0  # before a server that does not answer is tried again
_REFUSED_S = 60.0
_ALARMING_S = 2.0  # that a server has not answered: less is a connection that was lost

Object = dict[str, Any]

logger = logging.getLogger(__name__)


class Feed:
    """A daemon thread that keeps objects up to date until `stop`, or until nobody needs them.

    objects:  the existing objects, by name.
    deleted:  the deleted ones as last seen, by uid.
    live:     `objects` is what the server has, with a moment's delay.
    troubled: the server has not responded for a while, or refuses.
    refused:  why it refuses.

    lean:    reduces an object to what is kept.
    changed: called from this thread after each change, and when `troubled` becomes True.
    needed:  called now and then; the thread ends when it returns False.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        *,
        lean: Callable[[Object], Object],
        changed: Callable[[], None],
        needed: Callable[[], bool],
    ) -> None:
        self._api, self._path = api, path
        self._query = {"labelSelector": selector}
        self._lean, self._changed, self._needed = lean, changed, needed
        self.objects: dict[str, Object] = {}
        self.deleted: dict[str, Object] = {}
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

    def stop(self) -> None:
        """Stop the thread without waiting for it."""
        self._stop.set()
        self.live = False
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self.settled.set()

    @property
    def troubled(self) -> bool:
        return self._alarmed or self.refused is not None

    def _run(self) -> None:
        version: str | None = None
        failures = 0
        self._live_at = time.monotonic()
        while not self._stop.is_set() and self._needed():
            try:
                if version is None:
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
        """List all objects. Return the version from which to watch."""
        objects: list[Object] = []
        version = ""
        for answer in self._api.pages(self._path, self._query):
            objects += answer.get("items") or []
            version = str((answer.get("metadata") or {}).get("resourceVersion") or "0")
        self.objects = {name_of(each): self._lean(each) for each in objects}
        self._changed()
        return version

    def _watch(self, version: str) -> Iterator[str]:
        """Watch until the watch ends. Yield each version of `objects`, the first when the watch is open."""
        lifetime = random.randint(*_LIFETIME_S)
        query = {
            **self._query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(lifetime),
        }
        stream = self._api.stream(self._path, query=query, idle_s=lifetime + _LATE_S)
        with self._lock:
            self._stream = stream
            stopped = self._stop.is_set()
            self.live = not stopped
        try:
            if stopped:
                return
            self.refused, self._alarmed = None, False
            self.settled.set()
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
            name, lean = name_of(thing), self._lean(thing)
            if change == "DELETED":
                self.objects = {other: there for other, there in self.objects.items() if other != name}
                self.deleted[str((thing.get("metadata") or {}).get("uid"))] = lean
            else:
                self.objects = {**self.objects, name: lean}
            self._changed()
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
            self._changed()

    def _refuse(self, error: SchedulerError) -> None:
        self.live = False
        if self.refused is None and isinstance(error, Forbidden):
            logger.warning("%s; it is asked for again and again instead", one_line(str(error)))
        self.refused = error
        self.settled.set()
        self._changed()


def name_of(thing: Mapping[str, Any]) -> str:
    return str((thing.get("metadata") or {}).get("name"))


__all__ = ["Feed", "Object", "name_of"]
