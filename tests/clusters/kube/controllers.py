"""What the doubles of operators have in common: each brings the objects of its kind to what they ask for."""

from __future__ import annotations

import asyncio
import copy
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from .client import Object, Refused
from .watch import Connection, Events, Listing, stamp

_NOT_MADE = {"JobSet": "JobCreationFailed", "TrainJob": "TrainJobResourcesCreationFailed"}
POD, SERVICE = "/api/v1/pods", "/api/v1/services"


class Cluster:
    """What all operators see, and how they change it. A change is seen at once, before the server tells of it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.listings: dict[str, Listing] = {}
        self._controllers: list[Controller] = []

    def add(self, controller: Controller) -> None:
        self._controllers.append(controller)
        for path in (controller.path, *controller.owns):
            if path not in self.listings:
                self.listings[path] = Listing(self.connection, path, self._changed)

    def owned(self, owner: Object, path: str) -> list[Object]:
        """The owner's objects of one kind, in the order of their names."""
        uid = owner["metadata"]["uid"]
        found = [each for each in self.listings[path] if _controller_of(each) == uid]
        return sorted(found, key=lambda each: str(each["metadata"]["name"]))

    async def create(self, owner: Object, path: str, body: Object) -> Object:
        """Owned and in the owner's namespace. Raises Refused."""
        metadata = owner["metadata"]
        reference = {
            "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"],
            "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        made = {**body, "metadata": {**body["metadata"], "ownerReferences": [reference]}}
        return self._know(path, await self.connection.call("POST", _place(path, metadata["namespace"]), made))

    async def delete(self, path: str, item: Object, propagation: str = "Background") -> None:
        metadata = item["metadata"]
        body = {"propagationPolicy": propagation, "preconditions": {"uid": metadata["uid"]}}
        try:
            await self.connection.call("DELETE", self.path_of(path, item), body)
        except Refused as error:
            if error.status not in (404, 409):
                raise
        known = self.listings[path].objects.get(metadata["uid"])
        if known is not None:
            known["metadata"].setdefault("deletionTimestamp", stamp())

    async def patch(self, path: str, item: Object, body: Object, sub: str = "") -> None:
        """Merges `body` into the object; nothing when it is gone."""
        try:
            self._know(path, await self.connection.call("PATCH", self.path_of(path, item) + sub, body))
        except Refused as error:
            if error.status not in (404, 409):
                raise

    def path_of(self, path: str, item: Object) -> str:
        return f"{_place(path, item['metadata']['namespace'])}/{item['metadata']['name']}"

    def _know(self, path: str, item: Object) -> Object:
        known, uid = self.listings[path].objects, item["metadata"]["uid"]
        if uid not in known or _version(known[uid]) < _version(item):
            known[uid] = item
        return item

    def _changed(self, kind: str, item: Object) -> None:
        for controller in self._controllers:
            controller.consider(kind, item)


class Controller(ABC):
    """Brings objects of one kind to what they ask for, one at a time; several objects at once."""

    path: str
    kind: str
    name: str
    owns: Sequence[str] = (POD,)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.events = Events(cluster.connection, self.name)
        self._dirty: set[str] = set()
        self._busy: dict[str, asyncio.Task[None]] = {}
        cluster.add(self)

    @abstractmethod
    async def reconcile(self, item: Object, status: Object) -> float | None:
        """One step towards what the object asks for; changes `status`, which is its own copy.

        Returns after how many seconds to look again without a change; None: never. Must bear to be called again.
        """

    def consider(self, kind: str, item: Object) -> None:
        uid = item["metadata"]["uid"] if item.get("kind") == self.kind else _controller_of(item)
        if kind != "DELETED" or item.get("kind") != self.kind:
            self.look(uid)

    def look(self, uid: str | None) -> None:
        if uid not in self.cluster.listings[self.path].objects:
            return
        self._dirty.add(uid)
        if uid not in self._busy:
            task = asyncio.create_task(self._work(uid))
            self._busy[uid] = task

    def owned(self, owner: Object, path: str = POD) -> list[Object]:
        return self.cluster.owned(owner, path)

    async def create(self, owner: Object, path: str, body: Object) -> bool:
        """False when it is there already, or the server does not take it: that is told as an event, and tried again."""
        try:
            await self.cluster.create(owner, path, body)
        except Refused as error:
            if error.reason == "AlreadyExists":
                return False
            said = error.args[0].partition(": ")[2]
            reason = _NOT_MADE[owner["kind"]]
            self.events.tell(owner, reason, said, warning=True)
            asyncio.get_running_loop().call_later(1.0, self.look, owner["metadata"]["uid"])
            return False
        return True

    async def _work(self, uid: str) -> None:
        try:
            while uid in self._dirty:
                self._dirty.discard(uid)
                item = self.cluster.listings[self.path].objects.get(uid)
                if item is not None and not item["metadata"].get("deletionTimestamp"):
                    await self._step(item)
        except Exception as error:
            print(f"{self.name}: {error!r}", file=sys.stderr, flush=True)
            traceback.print_exc()
            asyncio.get_running_loop().call_later(1.0, self.look, uid)
        finally:
            del self._busy[uid]
        if uid in self._dirty:
            self.look(uid)

    async def _step(self, item: Object) -> None:
        status = copy.deepcopy(item.get("status") or {})
        again = await self.reconcile(item, status)
        if status != (item.get("status") or {}):
            await self.cluster.patch(
                self.path, item, {"status": difference(item.get("status") or {}, status)}, "/status"
            )
        if again is not None:
            asyncio.get_running_loop().call_later(max(0.05, again), self.look, item["metadata"]["uid"])


def difference(old: Object, new: Object) -> Object:
    """The merge patch (RFC 7386) that makes `old` into `new`: a key that must go, at any depth, is None in it."""
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        known = old.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            if value != known:
                patch[key] = difference(known, value)
        elif value != known:
            patch[key] = value
    return patch


def condition(status: Object, kind: str) -> Object | None:
    """That of this type, if it is true."""
    found = (each for each in status.get("conditions") or [] if each["type"] == kind and each["status"] == "True")
    return next(found, None)


def set_condition(status: Object, kind: str, reason: str, message: str, *, true: bool = True) -> None:
    said = "True" if true else "False"
    conditions = status.setdefault("conditions", [])
    known = next((each for each in conditions if each["type"] == kind), None)
    if known is not None and known["status"] == said:
        return
    fresh = {"type": kind, "status": said, "reason": reason, "message": message, "lastTransitionTime": stamp()}
    status["conditions"] = [each for each in conditions if each["type"] != kind] + [fresh]


def going(items: Sequence[Object]) -> list[Object]:
    """Without those that are being deleted."""
    return [each for each in items if not each["metadata"].get("deletionTimestamp")]


def merged(*parts: Mapping[str, str] | None) -> dict[str, str]:
    return {key: value for part in parts for key, value in (part or {}).items()}


def _controller_of(item: Object) -> str | None:
    for each in item["metadata"].get("ownerReferences") or []:
        if each.get("controller"):
            return str(each["uid"])
    return None


def _place(path: str, namespace: str) -> str:
    top, _, plural = path.rpartition("/")
    return f"{top}/namespaces/{namespace}/{plural}"


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])
