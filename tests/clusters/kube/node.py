"""The nodes of a Kubernetes cluster of the tests: a scheduler, and a kubelet for each, whose pods are processes.

    python -m tests.clusters.kube.node DIRECTORY    (by tests.clusters.kubernetes, with namespaces of its own)

`DIRECTORY/nodes.json` says what there is. Nothing but the cluster's API and the tests' commands tells it what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aiohttp import web

from ..netns import ClusterError
from .client import Object, Refused
from .kubelet import application
from .pod import Pod
from .podspec import Surroundings
from .sandbox import Sandbox
from .scheduler import Scheduler
from .watch import Access, Connection, Events, Listing, stamp

KUBELET_PORT = 10250
_HEARTBEAT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """What a node is and has."""

    name: str
    address: str
    capacity: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of all nodes: where the server is, the bridge and the names of cables, and the first and last pod's address."""

    server: str
    api_address: str
    api_port: int
    bridge: str
    cable: str
    subnet: str
    nodes: tuple[NodeShape, ...]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, file: Path) -> Shape:
        told = json.loads(file.read_text())
        nodes = tuple(NodeShape(**{**each, "taints": tuple(each["taints"])}) for each in told.pop("nodes"))
        return cls(**told, nodes=nodes)


class Addresses:
    """Those that no pod has. The one that was given back first is given out first."""

    def __init__(self, subnet: str) -> None:
        self._free = [f"{subnet}.{last}" for last in range(30, 255)]

    def take(self) -> str:
        if not self._free:
            raise ClusterError("every address of the pods' network is in use")
        return self._free.pop(0)

    def give_back(self, address: str) -> None:
        self._free.append(address)


class Nodes:
    """All nodes, in one process."""

    def __init__(self, box: Path, shape: Shape, connection: Connection) -> None:
        self.box = box
        self.shape = shape
        self.connection = connection
        self.events = Events(connection, "kubelet")
        self.pods: dict[str, Pod] = {}
        self.lost: set[str] = set()
        self._addresses = Addresses(shape.subnet)
        self._cables = itertools.count(1)
        self._services = Listing(connection, "/api/v1/services", lambda *_: self._names_changed.set())
        self._objects = Listing(connection, "/api/v1/pods", self._pod_changed)
        self._claims = Listing(connection, "/api/v1/persistentvolumeclaims", lambda *_: self._claims_changed.set())
        self._scheduler = Scheduler(connection, self._objects, Events(connection, "default-scheduler"))
        self._names_changed = asyncio.Event()
        self._claims_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        for node in self.shape.nodes:
            await self._register(node)
        for listing in (self._services, self._claims, self._objects):
            self._start(listing.run())
        for coroutine in (self._scheduler.run(), self._heartbeats(), self._write_hosts(), self._provision()):
            self._start(coroutine)
        runners = [await self._serve(node) for node in self.shape.nodes]
        await self._objects.listed.wait()
        (self.box / "node.ready").touch()
        await asyncio.Event().wait()
        del runners

    def _start(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"{task.get_coro()}: {task.exception()!r}", file=sys.stderr, flush=True)

    async def _register(self, node: NodeShape) -> None:
        labels = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        body = {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name, "labels": {**labels, **node.labels}},
            "spec": {"taints": [dict(each) for each in node.taints]},
        }  # fmt: skip
        with contextlib.suppress(Refused):
            await self.connection.call("POST", "/api/v1/nodes", body)
        await self._say_ready(node, first=True)

    async def _say_ready(self, node: NodeShape, *, first: bool = False, ready: bool = True) -> None:
        condition = {
            "type": "Ready", "status": "True" if ready else "Unknown", "lastHeartbeatTime": stamp(),
            "reason": "KubeletReady" if ready else "NodeStatusUnknown",
            "message": "kubelet is posting ready status" if ready else "Kubelet stopped posting node status.",
        }  # fmt: skip
        status: Object = {"conditions": [{**condition, "lastTransitionTime": stamp()}]}
        if first:
            status["capacity"] = status["allocatable"] = dict(node.capacity)
            status["addresses"] = [{"type": "InternalIP", "address": node.address}]
            status["daemonEndpoints"] = {"kubeletEndpoint": {"Port": KUBELET_PORT}}
        await self.connection.patch_status(f"/api/v1/nodes/{node.name}", status)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for node in self.shape.nodes:
                if node.name not in self.lost:
                    await self._say_ready(node)

    async def _serve(self, node: NodeShape) -> web.AppRunner:
        context = Access(self.shape.server, self.box / "pki", node.name).context(ssl.Purpose.CLIENT_AUTH)
        context.verify_mode = ssl.CERT_REQUIRED
        runner = web.AppRunner(application(self._find(node.name), self._command), shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, node.address, KUBELET_PORT, ssl_context=context).start()
        return runner

    def _find(self, node: str):  # type: ignore[no-untyped-def]
        def find(place: str, name: str) -> Pod | None:
            if node in self.lost:
                return None
            for pod in self.pods.values():
                metadata = pod.object["metadata"]
                if (metadata["namespace"], metadata["name"]) == (place, name) and pod.around.node == node:
                    return pod
            return None

        return find

    def _pod_changed(self, kind: str, item: Object) -> None:
        self._scheduler.wake()
        uid, node = item["metadata"]["uid"], item["spec"].get("nodeName")
        known = self.pods.get(uid)
        if kind == "DELETED":
            if known is not None:
                known.delete(None)
                self.pods.pop(uid)
                self._start(self._bury(known))
        elif node in self.lost:
            return
        elif item["metadata"].get("deletionTimestamp"):
            if known is not None and not known.over:
                known.object = item
                known.delete(item)
            elif known is not None or node is None or any(each.name == node for each in self.shape.nodes):
                self._start(self._remove(item))
        elif known is not None:
            known.object = item
        elif any(each.name == node for each in self.shape.nodes) and not _ended(item):
            self._adopt(item)

    async def _remove(self, item: Object) -> None:
        metadata = item["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        with contextlib.suppress(Refused):
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
            await self.connection.call("DELETE", path, body)

    def _adopt(self, item: Object) -> None:
        spec, uid = item["spec"], item["metadata"]["uid"]
        node = next(each for each in self.shape.nodes if each.name == spec["nodeName"])
        address = None if spec.get("hostNetwork") else self._addresses.take()
        sandbox = Sandbox(
            directory=self.box / "pods" / uid,
            hostname=spec.get("hostname") or item["metadata"]["name"],
            cable=f"{self.shape.cable}{next(self._cables)}",
            bridge=self.shape.bridge,
            address=address,
            gateway=self.shape.api_address,
        )
        shape = self.shape
        around = Surroundings(
            self.connection, node.name, node.address, address or node.address, shape.api_address, shape.api_port
        )
        pod = Pod(item, sandbox, around, self.events, self._names_changed.set)
        self.pods[uid] = pod
        pod.task = asyncio.create_task(pod.run())
        self._start(self._after(pod, address))

    async def _after(self, pod: Pod, address: str | None) -> None:
        assert pod.task is not None
        try:
            await asyncio.shield(pod.task)
        finally:
            if address is not None:
                self._addresses.give_back(address)

    async def _bury(self, pod: Pod) -> None:
        if pod.task is not None:
            await asyncio.wait([pod.task])
        pod.forget()

    async def _write_hosts(self) -> None:
        """Names of pods and Services, as the cluster's name server would have them."""
        while True:
            await self._names_changed.wait()
            self._names_changed.clear()
            for place in {pod.object["metadata"]["namespace"] for pod in self.pods.values()}:
                mine = [pod for pod in self.pods.values() if pod.object["metadata"]["namespace"] == place]
                lines = list(_names(place, mine, list(self._services)))
                for pod in mine:
                    if not pod.over and (pod.sandbox.directory / "names").exists():
                        own = f"{pod.around.address} {pod.sandbox.hostname}"
                        pod.sandbox.write_hosts("\n".join(["127.0.0.1 localhost", own, *lines, ""]))
            await asyncio.sleep(0.02)

    async def _provision(self) -> None:
        """A directory for each claim."""
        while True:
            await self._claims_changed.wait()
            self._claims_changed.clear()
            for claim in self._claims:
                if not claim["spec"].get("volumeName") and not claim["metadata"].get("deletionTimestamp"):
                    await self._make_volume(claim)

    async def _make_volume(self, claim: Object) -> None:
        metadata, spec = claim["metadata"], claim["spec"]
        directory = self.box / "claims" / metadata["uid"]
        if directory.exists():
            return
        directory.mkdir(parents=True)
        reference = {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"pv-{metadata['uid']}"},
            "spec": {
                "capacity": spec["resources"]["requests"], "accessModes": spec["accessModes"],
                "storageClassName": spec.get("storageClassName", ""), "hostPath": {"path": str(directory)},
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }  # fmt: skip
        with contextlib.suppress(Refused):
            await self.connection.call("POST", "/api/v1/persistentvolumes", body)

    async def _command(self, told: Object) -> None:
        """Raises LookupError for a pod or a node that is not there."""
        verb = told["verb"]
        if verb in ("lose", "find"):
            node = next(each for each in self.shape.nodes if each.name == told["node"])
            await (self._lose(node) if verb == "lose" else self._regain(node))
            return
        for pod in self.pods.values():
            metadata = pod.object["metadata"]
            if (metadata["namespace"], metadata["name"]) == (told["namespace"], told["pod"]) and not pod.over:
                if verb == "evict":
                    pod.fail("Evicted", told["message"])
                else:
                    pod.kill_container(told.get("container"), "OOMKilled")
                return
        raise LookupError(f"no pod {told['namespace']}/{told['pod']} runs")

    async def _lose(self, node: NodeShape) -> None:
        self.lost.add(node.name)
        for uid, pod in list(self.pods.items()):
            if pod.around.node == node.name:
                await pod.lose()
                self.pods.pop(uid)
                pod.forget()
        await self._say_ready(node, ready=False)

    async def _regain(self, node: NodeShape) -> None:
        self.lost.discard(node.name)
        await self._say_ready(node)
        for item in self._objects:
            if item["spec"].get("nodeName") == node.name:
                self._pod_changed("MODIFIED", item)


def _ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _names(place: str, pods: list[Pod], services: list[Object]) -> Iterator[str]:
    for service in services:
        selector, name = service["spec"].get("selector"), service["metadata"]["name"]
        if service["metadata"]["namespace"] != place or not selector:
            continue
        for pod in pods:
            labels = pod.object["metadata"].get("labels") or {}
            seen = pod.ready or service["spec"].get("publishNotReadyAddresses")
            if pod.over or not seen or any(labels.get(key) != value for key, value in selector.items()):
                continue
            forms = [name, f"{name}.{place}", f"{name}.{place}.svc", f"{name}.{place}.svc.cluster.local"]
            hostname = pod.object["spec"].get("hostname")
            if hostname and pod.object["spec"].get("subdomain") == name:
                forms += [f"{hostname}.{form}" for form in forms]
            yield f"{pod.around.address} {' '.join(forms)}"
            # torch's rendezvous looks the mapped address up, and logs an error each time it has no name.
            yield f"::ffff:{pod.around.address} {forms[-1]}"


async def _main(box: Path) -> None:
    shape = Shape.load(box / "nodes.json")
    connection = Connection(Access(shape.server, box / "pki", "admin"))
    try:
        await Nodes(box, shape, connection).run()
    finally:
        await connection.close()


if __name__ == "__main__":
    os.umask(0o022)
    asyncio.run(_main(Path(sys.argv[1])))
