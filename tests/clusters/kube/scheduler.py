"""The scheduler of a Kubernetes cluster of the tests: which node a pod runs on, or why on none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from .client import Object, Refused
from .podspec import quantity, requested
from .watch import Connection, Events, Listing, stamp


class Scheduler:
    """Gives pods to nodes in the order in which they were made; `wake` when something has changed."""

    def __init__(self, connection: Connection, pods: Listing, events: Events) -> None:
        self._connection = connection
        self._pods = pods
        self._events = events
        self._nodes = Listing(connection, "/api/v1/nodes", lambda *_: self.wake())
        self._woken = asyncio.Event()
        self._assumed: dict[str, str] = {}  # bound a moment ago, and not yet heard of
        self._said: dict[str, str] = {}

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        watching = asyncio.create_task(self._nodes.run())
        try:
            await self._nodes.listed.wait()
            while True:
                await self._woken.wait()
                self._woken.clear()
                await self._round()
        finally:
            watching.cancel()

    async def _round(self) -> None:
        alive = {pod["metadata"]["uid"]: pod for pod in self._pods}
        self._assumed = {
            uid: node for uid, node in self._assumed.items() if uid in alive and not alive[uid]["spec"].get("nodeName")
        }
        waiting = [pod for uid, pod in alive.items() if _waits(pod) and uid not in self._assumed]
        for pod in sorted(waiting, key=lambda each: int(each["metadata"]["resourceVersion"])):
            await self._place(pod)

    async def _place(self, pod: Object) -> None:
        reasons: Counter[str] = Counter()
        nodes = list(self._nodes)
        for node in sorted(nodes, key=lambda each: (self._load(each), each["metadata"]["name"])):
            why = list(self._against(pod, node))
            if not why:
                await self._bind(pod, node["metadata"]["name"])
                return
            reasons.update(why)
        listed = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))
        await self._refuse(pod, f"0/{len(nodes)} nodes are available: {listed}.")

    def _against(self, pod: Object, node: Object) -> Iterator[str]:
        """What speaks against the node, in the words of the real one."""
        spec = pod["spec"]
        labels = node["metadata"].get("labels") or {}
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] != "PreferNoSchedule" and not _tolerated(taint, spec.get("tolerations") or []):
                yield f"node(s) had taint {{{taint['key']}: {taint.get('value', '')}}}, that the pod didn't tolerate"
                return
        if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
            yield "node(s) didn't match Pod's node affinity"
            return
        used: Counter[str] = Counter()
        for other in self._on(node["metadata"]["name"]):
            used.update(requested(other))
        for resource, wanted in requested(pod).items():
            there = quantity((node["status"].get("allocatable") or {}).get(resource, "0"))
            if used[resource] + wanted > there:
                yield "Too many pods" if resource == "pods" else f"Insufficient {resource}"

    def _on(self, node: str) -> list[Object]:
        found = []
        for pod in self._pods:
            there = pod["spec"].get("nodeName") or self._assumed.get(pod["metadata"]["uid"])
            if there == node and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                found.append(pod)
        return found

    def _load(self, node: Object) -> int:
        return len(self._on(node["metadata"]["name"]))

    async def _bind(self, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        place, name = metadata["namespace"], metadata["name"]
        body = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "uid": metadata["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }  # fmt: skip
        try:
            await self._connection.call("POST", f"/api/v1/namespaces/{place}/pods/{name}/binding", body)
        except Refused:
            return  # it is gone, or bound: the watch says which
        self._assumed[metadata["uid"]] = node
        self._events.tell(pod, "Scheduled", f"Successfully assigned {place}/{name} to {node}")

    async def _refuse(self, pod: Object, message: str) -> None:
        metadata = pod["metadata"]
        if self._said.get(metadata["uid"]) == message:
            return
        self._said[metadata["uid"]] = message
        self._events.tell(pod, "FailedScheduling", message, warning=True)
        condition = {
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message,
            "lastTransitionTime": stamp(),
        }  # fmt: skip
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        await self._connection.patch_status(path, {"conditions": [condition]})


def _waits(pod: Object) -> bool:
    return not pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp")


def _tolerated(taint: Object, tolerations: list[Object]) -> bool:
    for each in tolerations:
        if each.get("effect") not in (None, "", taint["effect"]):
            continue
        if each.get("operator") == "Exists" and each.get("key") in (None, "", taint["key"]):
            return True
        if each.get("key") == taint["key"] and each.get("value", "") == taint.get("value", ""):
            return True
    return False
