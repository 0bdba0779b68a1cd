"""Watches of the jobs that this process waits for: one of each job's object and one of its pods.

All targets that use the same server as the same user share them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import names
from ..client.informer import Feed, Object, name_of
from ..native_id import Native
from . import job_states

if TYPE_CHECKING:
    from ..client.api import Api

_IDLE_S = 60.0  # a watcher whom nobody has asked for so long ends with its watches
_SETTLE_S = 5.0

WARNINGS = "type=Warning"


class Watcher:
    """The watches of one job. Thread-safe."""

    def __init__(self, api: Api, native: Native) -> None:
        self.api, self._native = api, native
        self._news = threading.Event()
        self.asked_at = time.monotonic()

        def feed(plural: str, version: str, lean: Callable[[Object], Object], changed: Callable[[], None]) -> Feed:
            path = api.path(version, plural, namespace=native.namespace)
            return Feed(api, path, native.selector, lean=lean, changed=changed, needed=self._needed)

        self._workloads = feed(native.plural, native.api_version, _lean, self._look)
        self._pods = feed("pods", "v1", lean_pod, lambda: None)
        self._feeds = (self._workloads, self._pods)
        for each in self._feeds:
            each.start()

    def wait(self, timeout_s: float) -> bool | None:
        """Wait until the job is over or gone, or the server has not responded for a while.

        Returns True then, False after the timeout, and None if the server does not allow the watch.
        """
        for feed in self._feeds:  # what they know need not be queried
            feed.settled.wait(_SETTLE_S)
        if self._workloads.live and self._may_be_over():
            return True
        if self._workloads.refused is not None:
            return None
        if self._news.wait(timeout_s):
            self._news.clear()
            return None if self._workloads.refused is not None else True
        return False

    def snapshot(self) -> tuple[Object | None, list[Object]] | None:
        """Return the job's object (None if there is none) and its pods, or None if that is unknown now."""
        if not all(feed.live for feed in self._feeds):
            return None
        workload = self._workloads.objects.get(self._native.name)
        if workload is not None and not self._native.owns(workload):
            return None, []  # a later object of its name, and that one's pods
        return workload, list(self._pods.objects.values())

    def deleted_pods(self) -> list[Object]:
        """Return deleted pods as last seen: operators delete those of a failed job at once."""
        return list(self._pods.deleted.values())

    def stop(self) -> None:
        """Stop the watches and wake up all callers of `wait`."""
        for feed in self._feeds:
            feed.stop()
        self._news.set()

    def _needed(self) -> bool:
        """Return False, and stop both watches, if nobody has used them for 60 s."""
        with _lock:
            if time.monotonic() - self.asked_at < _IDLE_S:
                return True
            for key in [key for key, watcher in _watchers.items() if watcher is self]:
                del _watchers[key]
        self.stop()
        return False

    def _look(self) -> None:
        if self._workloads.troubled or self._may_be_over():
            self._news.set()

    def _may_be_over(self) -> bool:
        workload = self._workloads.objects.get(self._native.name)
        return workload is None or not self._native.owns(workload) or job_states.status_of(workload).state.final


def concerned(native: Native, pods: Sequence[Object]) -> list[str]:
    """Return the names of objects whose warnings concern the job: its own, its controllers', and its pods."""
    made = [] if native.workload in ("pytorchjob", "job") else [f"{native.name}-node-0"]
    return list(dict.fromkeys([native.name, *made, *map(name_of, pods)]))


def lean_pod(pod: Object) -> Object:
    """Return the pod reduced to the fields in use: there may be thousands of pods."""
    spec = pod.get("spec") or {}
    kept = {
        key: spec[key]
        for key in ("nodeName", "restartPolicy", "terminationGracePeriodSeconds")
        if spec.get(key) is not None
    }
    kept["containers"] = [
        {"name": each.get("name"), "command": each.get("command")} for each in spec.get("containers") or []
    ]
    kept["initContainers"] = [{"name": each.get("name")} for each in spec.get("initContainers") or []]
    return {**_lean(pod), "spec": kept}


def _lean(thing: Object) -> Object:
    metadata = {key: value for key, value in (thing.get("metadata") or {}).items() if key != "managedFields"}
    notes = metadata.get("annotations")
    if notes and names.SPEC in notes:
        metadata["annotations"] = {key: value for key, value in notes.items() if key != names.SPEC}
    return {**thing, "metadata": metadata}


_watchers: dict[str, Watcher] = {}
_lock = threading.Lock()


def _key(api: Api, native: Native) -> str:
    return f"{api.identity}\0{native}"


def shared(api: Api, native: Native) -> Watcher:
    """Return this process's watcher of the job for this server and user; create it if needed."""
    key = _key(api, native)
    with _lock:
        if key not in _watchers:
            _watchers[key] = Watcher(api, native)
        _watchers[key].asked_at = time.monotonic()
        return _watchers[key]


def running(api: Api, native: Native) -> Watcher | None:
    return shared(api, native) if _key(api, native) in _watchers else None


def release(api: Api, native: Native | None = None) -> None:
    """Stop the watches of a finished job, or all over these connections. They restart when needed."""
    with _lock:
        one = None if native is None else _key(api, native)
        mine = [key for key, each in _watchers.items() if (each.api is api if one is None else key == one)]
        ended = [_watchers.pop(key) for key in mine]
    for watcher in ended:
        watcher.stop()


def _forget() -> None:
    """Drop all watches in a forked child: it has no threads, and the connections are its parent's."""
    global _lock
    _lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_forget)


__all__ = ["WARNINGS", "Watcher", "concerned", "lean_pod", "release", "running", "shared"]
