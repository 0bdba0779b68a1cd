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
from .errors import ApiError, Forbidden, ResourceExpired

if TYPE_CHECKING:
    from .api import Api, Stream

_LIFETIME_S = (240, 300)  # of one watch: less than the server's own limit
_READ_SLACK_S = 60.0
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0  # between attempts to reach a server
_ERROR_PAUSE_S = 60.0
_ALARMING_S = 2.0  # without a response; less may be just a lost connection

Object = dict[str, Any]

logger = logging.getLogger(__name__)


class Informer:
    """A daemon thread that keeps objects up to date until `stop`, or until `keep_alive` returns False.

    objects:  the existing objects, by name.
    deleted:  the deleted ones as last seen, by uid.
    live:     `objects` is up to date, with a moment's delay.
    degraded: the server has not responded for a while, or refuses.
    error:    the refusal.

    transform:  reduces an object to the fields to keep.
    on_change:  called from this thread after each change, and when `degraded` becomes True.
    keep_alive: called now and then.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        *,
        transform: Callable[[Object], Object],
        on_change: Callable[[], None],
        keep_alive: Callable[[], bool],
    ) -> None:
        self._api, self._path = api, path
        self._query = {"labelSelector": selector}
        self._transform, self._on_change, self._keep_alive = transform, on_change, keep_alive
        self.objects: dict[str, Object] = {}
        self.deleted: dict[str, Object] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._is_overdue = False
        self._last_live_at = 0.0
        self.live = False
        self.error: SchedulerError | None = None
        self.synced = threading.Event()  # set after the first response or failure
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
        self.synced.set()

    @property
    def degraded(self) -> bool:
        return self._is_overdue or self.error is not None

    def _run(self) -> None:
        version: str | None = None
        failures, expired = 0, False
        self._last_live_at = time.monotonic()
        while not self._stop.is_set() and self._keep_alive():
            try:
                if version is None:
                    version = self._list()
                for number, resource_version in enumerate(self._watch(version)):
                    version = resource_version
                    if number or not expired:  # a watch may open and then answer 410
                        failures, expired = 0, False
            except (ResourceExpired, Unreachable) as error:
                if isinstance(error, ResourceExpired):
                    version, expired = None, True
                failures += 1
                self._fail(error)
                pause = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** min(failures - 1, 10))
                self._stop.wait(pause * random.uniform(0.5, 1.5))
            except SchedulerError as error:
                version = None
                self._refuse(error)
                self._stop.wait(_ERROR_PAUSE_S * random.uniform(0.8, 1.2))
            except Exception:
                # Callers of `wait` query the server instead, and report its error.
                logger.exception("watching %s failed", self._path)
                version = None
                self._refuse(ApiError(f"watching {self._path} failed"))
                self._stop.wait(_ERROR_PAUSE_S)

    def _list(self) -> str:
        """List all objects. Return the version from which to watch."""
        objects: list[Object] = []
        version = ""
        for page in self._api.pages(self._path, self._query):
            objects += page.get("items") or []
            version = str((page.get("metadata") or {}).get("resourceVersion") or "0")
        self.objects = {name_of(resource): self._transform(resource) for resource in objects}
        self._on_change()
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
        stream = self._api.stream(self._path, query=query, idle_s=lifetime + _READ_SLACK_S)
        with self._lock:
            self._stream = stream
            stopped = self._stop.is_set()
            self.live = not stopped
        try:
            if stopped:
                return
            self.error, self._is_overdue = None, False
            self.synced.set()
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
        resource, change = event.get("object") or {}, str(event.get("type"))
        if change == "ERROR":
            message = str(resource.get("message") or "the watch ended")
            if resource.get("code") == 410:
                raise ResourceExpired(message)
            # Retried: for example, the server's cache is not filled yet.
            raise Unreachable(f"{self._path}: {message}")
        if change != "BOOKMARK":
            name, transformed = name_of(resource), self._transform(resource)
            if change == "DELETED":
                self.objects = {key: value for key, value in self.objects.items() if key != name}
                self.deleted[str((resource.get("metadata") or {}).get("uid"))] = transformed
            else:
                self.objects = {**self.objects, name: transformed}
            self._on_change()
        version = (resource.get("metadata") or {}).get("resourceVersion")
        return None if version is None else str(version)

    def _fail(self, error: SchedulerError) -> None:
        if self.live:
            self.live, self._is_overdue = False, False
            self._last_live_at = time.monotonic()
        logger.debug("watching %s: %s", self._path, error)
        if not self._is_overdue and time.monotonic() - self._last_live_at > _ALARMING_S:
            self._is_overdue = True
            self.synced.set()
            self._on_change()

    def _refuse(self, error: SchedulerError) -> None:
        self.live = False
        if self.error is None and isinstance(error, Forbidden):
            logger.warning("%s; polling instead", one_line(str(error)))
        self.error = error
        self.synced.set()
        self._on_change()


def name_of(resource: Mapping[str, Any]) -> str:
    return str((resource.get("metadata") or {}).get("name"))
