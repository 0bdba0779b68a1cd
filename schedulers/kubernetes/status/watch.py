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
from ..client.informer import Informer, Object, name_of
from ..native_id import Native
from . import job_states

if TYPE_CHECKING:
    from ..client.api import Api

_IDLE_S = 60.0  # an unused watcher stops after this time
_SYNC_S = 5.0

WARNINGS = "type=Warning"


class Watcher:
    """The watches of one job. Thread-safe."""

    def __init__(self, api: Api, native: Native) -> None:
        self.api, self._native = api, native
        self._changed = threading.Event()
        self.last_used_at = time.monotonic()

        def make_informer(
            plural: str, version: str, transform: Callable[[Object], Object], on_change: Callable[[], None]
        ) -> Informer:
            path = api.path(version, plural, namespace=native.namespace)
            return Informer(
                api, path, native.selector, transform=transform, on_change=on_change, keep_alive=self._is_in_use
            )

        self._workloads = make_informer(native.plural, native.api_version, _strip_workload, self._notify_if_over)
        self._pods = make_informer("pods", "v1", strip_pod, lambda: None)
        self._informers = (self._workloads, self._pods)
        for informer in self._informers:
            informer.start()

    def wait(self, timeout_s: float) -> bool | None:
        """Wait until the job is over or gone, or the server has not responded for a while.

        Returns True then, False after the timeout, and None if the server does not allow the watch.
        """
        for informer in self._informers:  # then `snapshot` needs no query
            informer.synced.wait(_SYNC_S)
        if self._workloads.live and self._may_be_over():
            return True
        if self._workloads.error is not None:
            return None
        if self._changed.wait(timeout_s):
            self._changed.clear()
            return None if self._workloads.error is not None else True
        return False

    def snapshot(self) -> tuple[Object | None, list[Object]] | None:
        """Return the job's object (None if there is none) and its pods, or None if that is unknown now."""
        if not all(informer.live for informer in self._informers):
            return None
        workload = self._workloads.objects.get(self._native.name)
        if workload is not None and not self._native.owns(workload):
            return None, []  # a later object has the name and the pods
        return workload, list(self._pods.objects.values())

    def deleted_pods(self) -> list[Object]:
        """Return deleted pods as last seen: operators delete those of a failed job at once."""
        return list(self._pods.deleted.values())

    def stop(self) -> None:
        """Stop the watches and wake up all callers of `wait`."""
        for informer in self._informers:
            informer.stop()
        self._changed.set()

    def _is_in_use(self) -> bool:
        """Return False, and stop both watches, if nobody has used them for 60 s."""
        with _lock:
            if time.monotonic() - self.last_used_at < _IDLE_S:
                return True
            for key in [key for key, watcher in _watchers.items() if watcher is self]:
                del _watchers[key]
        self.stop()
        return False

    def _notify_if_over(self) -> None:
        if self._workloads.degraded or self._may_be_over():
            self._changed.set()

    def _may_be_over(self) -> bool:
        workload = self._workloads.objects.get(self._native.name)
        return workload is None or not self._native.owns(workload) or job_states.status_of(workload).state.final


def workload_and_pods(native: Native, pods: Sequence[Object]) -> list[str]:
    """Return the names of the job's object, of its controllers and of its pods, whose events concern the job."""
    controller_names = [] if native.workload in ("pytorchjob", "job") else [f"{native.name}-node-0"]
    return list(dict.fromkeys([native.name, *controller_names, *map(name_of, pods)]))


def strip_pod(pod: Object) -> Object:
    """Return the pod reduced to the used fields: there may be thousands of pods."""
    spec = pod.get("spec") or {}
    fields = ("nodeName", "restartPolicy", "terminationGracePeriodSeconds")
    reduced_spec = {key: spec[key] for key in fields if spec.get(key) is not None}
    reduced_spec["containers"] = [
        {"name": container.get("name"), "command": container.get("command")}
        for container in spec.get("containers") or []
    ]
    reduced_spec["initContainers"] = [{"name": container.get("name")} for container in spec.get("initContainers") or []]
    return {**_strip_workload(pod), "spec": reduced_spec}


def _strip_workload(resource: Object) -> Object:
    metadata = {key: value for key, value in (resource.get("metadata") or {}).items() if key != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and names.SPEC in annotations:
        metadata["annotations"] = {key: value for key, value in annotations.items() if key != names.SPEC}
    return {**resource, "metadata": metadata}


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
        _watchers[key].last_used_at = time.monotonic()
        return _watchers[key]


def running(api: Api, native: Native) -> Watcher | None:
    return shared(api, native) if _key(api, native) in _watchers else None


def release(api: Api, native: Native | None = None) -> None:
    """Stop the watches of a finished job, or all watches of this client. They restart when needed."""
    with _lock:
        if native is not None:
            keys = [_key(api, native)]
        else:
            keys = [key for key, watcher in _watchers.items() if watcher.api is api]
        released = [_watchers.pop(key) for key in keys if key in _watchers]
    for watcher in released:
        watcher.stop()


def _forget() -> None:
    """Drop all watches in a forked child: it has no threads, and the connections are its parent's."""
    global _lock
    _lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_forget)
