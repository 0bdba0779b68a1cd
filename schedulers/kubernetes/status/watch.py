"""What an API server has of the jobs that this process waits for, kept up to date by one watch of their objects and one
of their pods, for all targets that ask the same server as the same user in the same namespace.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import names
from ..client.informer import Feed, Object
from ..native_id import Native
from . import job_states

if TYPE_CHECKING:
    from ..client.api import Api

_IDLE_S = 60.0  # a watcher whom nobody has asked for so long ends
_SWEEP_S = 5.0
_MOST_DELETED = 1000
_SETTLE_S = 5.0

WARNINGS = "type=Warning"


class Watcher:
    """Of one namespace. Safe to use from several threads."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        self._workloads: dict[str, dict[str, Object]] = {}
        self._pods: dict[str, dict[str, Object]] = {}  # by the label of the job
        self._deleted: OrderedDict[str, Object] = OrderedDict()  # pods, as they were last; by their uid
        self._waited_at: dict[str, float] = {}  # when somebody last waited for a job; by its label
        self._news: dict[tuple[str, str], threading.Event] = {}
        self._asked_at = time.monotonic()
        self._stopped = False

    @property
    def idle(self) -> bool:
        return time.monotonic() - self._asked_at > _IDLE_S

    def wait(self, native: Native, timeout_s: float) -> bool | None:
        """Until the job's object says that the job is over, is gone, or the server has not answered for a while: True.
        False when only the time is over, None when the server does not let it be watched."""
        self._asked_at = time.monotonic()
        feed = self._feed(native)
        with self._lock:
            news = self._news.setdefault((native.plural, native.name), threading.Event())
            if feed.covers(names.label_value(native.job_id)) and self._may_be_over(native):
                return True
        if feed.refused is not None:
            return None
        if news.wait(timeout_s):
            news.clear()
            return None if feed.refused is not None else True
        return False

    def snapshot(self, native: Native) -> tuple[Object | None, list[Object]] | None:
        """The job's object (None: there is none) and its pods; None when that is not known now."""
        job = names.label_value(native.job_id)
        with self._lock:
            self._asked_at = time.monotonic()
            feeds = [self._feeds.get(native.plural), self._feeds.get("pods")]
            if not all(feed is not None and feed.covers(job) for feed in feeds):
                return None
            return self._workloads[native.plural].get(native.name), list(self._pods.get(job, {}).values())

    def forget(self, native: Native) -> None:
        """Leaves out a job that is over when the watches are opened for others."""
        with self._lock:
            self._waited_at.pop(names.label_value(native.job_id), None)

    def deleted_pods(self, native: Native) -> list[Object]:
        """Pods that are gone, as they were seen last: an operator that gives a job up deletes them at once."""
        label = names.label_value(native.job_id)
        with self._lock:
            return [pod for pod in self._deleted.values() if _job(pod) == label]

    def pods(self, native: Native) -> list[Object] | None:
        """None when they are not known now."""
        found = self.snapshot(native)
        return None if found is None else found[1]

    def stop(self) -> None:
        """Ends the watches; whoever waits goes on as without them."""
        with self._lock:
            self._stopped = True
            feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.stop()
        self._wake()

    def _feed(self, native: Native) -> Feed:
        """The feed of the job's kind, with that of the pods beside it. Where the job is not watched yet, waits a moment
        for them: what they know need not be queried."""
        with self._lock:
            jobs = self._selected(names.label_value(native.job_id))
            opened: list[Feed] = []
            for plural, version in ((native.plural, native.api_version), ("pods", "v1")):
                if plural not in self._feeds:
                    path = self.api.path(version, plural, namespace=self.namespace)
                    sink = _Pods(self) if plural == "pods" else _Workloads(self, plural)
                    self._workloads.setdefault(plural, {})
                    opened.append(self._feeds.setdefault(plural, Feed(self.api, path, self._waited_at, sink)))
            widened = [] if jobs is None else [feed for feed in self._feeds.values() if feed not in opened]
            feed = self._feeds[native.plural]
            if self._stopped:
                self._feeds = {}
                return feed
            for each in opened:
                each.start()
            for each in widened:
                each.select(jobs or ())
        for each in (*opened, *widened):
            each.settled.wait(_SETTLE_S)
        return feed

    def _selected(self, job: str) -> list[str] | None:
        """The jobs that are to be watched, where this one is new; None where it is among them already."""
        now = time.monotonic()
        new = job not in self._waited_at
        self._waited_at[job] = now
        if not new:
            return None
        self._waited_at = {each: at for each, at in self._waited_at.items() if now - at < _IDLE_S}
        return list(self._waited_at)

    def _may_be_over(self, native: Native) -> bool:
        workload = self._workloads[native.plural].get(native.name)
        return workload is None or job_states.status_of(workload).state.final

    def _wake(self, plural: str | None = None, name: str | None = None) -> None:
        for (one, other), news in list(self._news.items()):
            if plural in (None, one) and name in (None, other):
                news.set()


class _Workloads:
    def __init__(self, watcher: Watcher, plural: str) -> None:
        self._watcher = watcher
        self._plural = plural

    def replaced(self, objects: Sequence[Object]) -> None:
        known = {_name(each): _lean(each) for each in objects}
        with self._watcher._lock:
            self._watcher._workloads[self._plural] = known
        # What is over, or gone, meanwhile was not reported.
        for plural, name in list(self._watcher._news):
            if plural == self._plural and (name not in known or job_states.status_of(known[name]).state.final):
                self._watcher._wake(plural, name)

    def changed(self, change: str, thing: Object) -> None:
        name = _name(thing)
        with self._watcher._lock:
            if change == "DELETED":
                self._watcher._workloads[self._plural].pop(name, None)
            else:
                self._watcher._workloads[self._plural][name] = _lean(thing)
        if (self._plural, name) in self._watcher._news and (
            change == "DELETED" or job_states.status_of(thing).state.final
        ):
            self._watcher._wake(self._plural, name)

    def troubled(self) -> None:
        self._watcher._wake(self._plural)


class _Pods:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def replaced(self, objects: Sequence[Object]) -> None:
        known: dict[str, dict[str, Object]] = {}
        for each in objects:
            known.setdefault(_job(each), {})[_name(each)] = lean_pod(each)
        with self._watcher._lock:
            self._watcher._pods = known

    def changed(self, change: str, thing: Object) -> None:
        with self._watcher._lock:
            pods = self._watcher._pods.setdefault(_job(thing), {})
            if change != "DELETED":
                pods[_name(thing)] = lean_pod(thing)
                return
            pods.pop(_name(thing), None)
            deleted = self._watcher._deleted
            deleted[str((thing.get("metadata") or {}).get("uid"))] = lean_pod(thing)
            while len(deleted) > _MOST_DELETED:
                deleted.popitem(last=False)
            if not pods:
                del self._watcher._pods[_job(thing)]

    def troubled(self) -> None:
        pass


def concerned(native: Native, pods: Sequence[Object]) -> list[str]:
    """The names of the objects whose warnings say something of the job: its own, those that its controllers make on
    the way to pods, and the pods."""
    made = [] if native.workload in ("pytorchjob", "job") else [f"{native.name}-node-0"]
    return list(dict.fromkeys([native.name, *made, *map(_name, pods)]))


def lean_pod(pod: Object) -> Object:
    """What is asked of pods, and no more: there may be thousands."""
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


def _name(thing: Mapping[str, Any]) -> str:
    return str((thing.get("metadata") or {}).get("name"))


def _job(thing: Mapping[str, Any]) -> str:
    return str(((thing.get("metadata") or {}).get("labels") or {}).get(names.JOB_ID))


_watchers: dict[str, Watcher] = {}
_lock = threading.Lock()
_sweeper: threading.Thread | None = None


def shared(api: Api, namespace: str) -> Watcher:
    """The watcher of this server, user and namespace in this process; made when there is none."""
    global _sweeper
    with _lock:
        key = f"{api.identity}\0{namespace}"
        if key not in _watchers:
            _watchers[key] = Watcher(api, namespace)
        if _sweeper is None:
            _sweeper = threading.Thread(target=_sweep, name="ending idle watches", daemon=True)
            _sweeper.start()
        return _watchers[key]


def running(api: Api, namespace: str) -> Watcher | None:
    with _lock:
        return _watchers.get(f"{api.identity}\0{namespace}")


def release(api: Api) -> None:
    """Ends the watches that go through the connections of this one; another's next question starts them anew."""
    with _lock:
        mine = [key for key, watcher in _watchers.items() if watcher.api is api]
        ended = [_watchers.pop(key) for key in mine]
    for watcher in ended:
        watcher.stop()


def _sweep() -> None:
    global _sweeper
    while True:
        time.sleep(_SWEEP_S)
        with _lock:
            ended = [_watchers.pop(key) for key, watcher in list(_watchers.items()) if watcher.idle]
            over = not _watchers
            if over:
                _sweeper = None
        for watcher in ended:
            with contextlib.suppress(OSError):
                watcher.stop()
        if over:
            return


def _forget() -> None:
    """In a child of this process: its threads are not there, and their connections are the parent's."""
    global _lock, _sweeper
    _lock = threading.Lock()
    _watchers.clear()
    _sweeper = None


os.register_at_fork(after_in_child=_forget)


__all__ = ["WARNINGS", "Watcher", "concerned", "lean_pod", "release", "running", "shared"]
