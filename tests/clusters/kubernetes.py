"""A real Kubernetes on this computer: control plane, two nodes with kubelets, and the training operator.

    python -m tests.clusters.kubernetes up [NODES] [--gpus=N]
                                                     one that is up is left alone; prints what a client needs
    python -m tests.clusters.kubernetes kubeconfig   the path of the administrator's
    python -m tests.clusters.kubernetes status       which of its programs run
    python -m tests.clusters.kubernetes diagnose     the last lines of every log
    python -m tests.clusters.kubernetes down         ends everything and removes it

The programs are Kubernetes' own (`kube/programs.py` says where they come from). JobSet and Trainer, and a storage
driver, are played by a process that talks to the API server as the real ones do (`kube/operators.py`). Containers see
this computer's /usr, the interpreter and accel, read-only (`kube/images.py`); GPUs are numbers that the nodes report.

It needs root, and the packages that `lacks` names. Everything is found again by names, so that one program may start a
cluster and another end it.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import yaml

from tests.waiting import comes

from .kube import health, images, nodes, objects, programs, webhook
from .kube.client import MERGE, Client, Object, Refused
from .kube.control import ControlPlane, Daemon
from .kube.crds import INSTALLED, definitions, established
from .kube.nodes import Node
from .kube.training import TrainingOperator
from .netns import ClusterError, Network, Slot, lacking, wait_until

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("ACCEL_TEST_IMAGE", images.TRAIN)
START_S = 120.0
_HEAL_S = 60.0
_KIND = "ak"
_COMMAND_SLOT = Slot(_KIND, 250)
_MOST_NODES = 4


def lacks() -> tuple[str, str] | None:
    """What this computer lacks for a cluster, and the remedy."""
    return lacking(**nodes.PROGRAMS) or nodes.lacking_plugins() or programs.lacking()


class Kubernetes:
    """One cluster. To be stopped; a `with` does it.

    alone: no other test uses it now, so that it may be broken.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.alone = True
        self.box = slot.box
        self.network = Network(slot)
        self.control = ControlPlane(self.box, self.network.address(0))
        self.operator = TrainingOperator(self.network, self.control.authority)
        self.nodes: dict[str, Node] = {}
        self._operators = Daemon("operators", self.box)
        self._client: Client | None = None

    def __enter__(self) -> Kubernetes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.slot.release()

    @property
    def server(self) -> str:
        return self.control.server

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        control = self.control
        return control.etcd, control.api, control.controllers, control.scheduler, control.names, self._operators

    @property
    def client(self) -> Client:
        """The administrator's."""
        if self._client is None:
            self._client = self.control.client()
        return self._client

    def start(self, count: int = 2, *, gpus: int = 8) -> None:
        """`count` nodes, n1 and so on, with this computer's processors and memory, and `gpus` seeming GPUs each.

        Raises ClusterError, with what the programs said last.
        """
        if not 1 <= count <= _MOST_NODES:
            raise ClusterError(f"between 1 and {_MOST_NODES} nodes, not {count}")
        self.stop()
        self.box.mkdir(mode=0o711)
        self.network.up()
        self.control.create()
        self.control.start_etcd()
        module = [sys.executable, "-m", "tests.clusters.kube.operators", str(self.box), self.control.address]
        self._operators.start(["env", "-C", ROOT, *module])  # it waits for the server, and has imported by then
        self.control.start_api()
        self.control.start_controllers(self.kubeconfig())
        self.install(INSTALLED)
        self._start_nodes(count)
        self.operator.start(self.client)
        names = list(self.nodes)
        wait_until("its nodes are ready", lambda: nodes.ready(self.client.call, names), START_S)
        for name in names if gpus else ():
            labels = {"metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}}
            self.client.call("PATCH", f"/api/v1/nodes/{name}", labels, content_type=MERGE)
            self.report(name, {"nvidia.com/gpu": str(gpus)})
        wait_until(f"{self._operators.name} are ready ({self._operators.log})", self._operators_ready, START_S)

    def stop(self) -> None:
        """Ends every process of the cluster and removes all that there was."""
        for file in self.box.glob("*.pid"):
            Daemon(file.stem, self.box).stop()
        if self._client is not None:
            self._client.close()
            self._client = None
        for node in self._all_nodes():
            node.end()
        self.operator.end()
        self.nodes = {}
        self.network.down()
        shutil.rmtree(self.box, ignore_errors=True)

    def install(self, kinds: Sequence[str]) -> None:
        """The definitions of these operators' objects; those that are there stay."""
        wanted = [each for kind in kinds for each in definitions(kind)]
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for definition in wanted:
            objects.create(self.client, path, definition)
        for definition in wanted:
            place = f"{path}/{definition['metadata']['name']}"
            wait_until(f"{place} is served", partial(self._served, place), START_S)
        if "trainjob" in kinds:
            hook = webhook.configuration(self.control.address, self.control.authority.certificate.read_bytes())
            objects.create(self.client, webhook.CONFIGURATIONS, hook)

    def stop_api(self) -> None:
        """SIGKILL: connections are cut, and new ones refused."""
        self._breaks()
        self.control.api.stop()

    def start_api(self) -> None:
        """Nothing when it runs; it is ready when this returns."""
        self.control.start_api()

    def freeze(self, part: str, frozen: bool = True) -> None:
        """The API server (`kube-apiserver`) or the name server (`coredns`): it keeps its connections and is mute."""
        self._breaks()
        found = next(daemon for daemon in self.daemons if daemon.name == part)
        found.send(signal.SIGSTOP if frozen else signal.SIGCONT)

    def compact(self) -> None:
        """Forgets the past: every watch is cut, and one that goes on from a version that it knew gets 410 (Expired)."""
        body = {"metadata": {"name": f"past-{uuid.uuid4().hex[:8]}"}}
        path = "/api/v1/namespaces/default/configmaps"
        self.client.call("POST", path, body)
        self.client.call("DELETE", f"{path}/{body['metadata']['name']}")
        self.stop_api()
        self.control.compact()
        self.start_api()

    def namespace(self, prefix: str = "test") -> str:
        """A new one, in which pods can be made at once."""
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self.client.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_until(f"{name} has its service account", lambda: self._has_account(path), START_S)
        return name

    def remove_namespace(self, name: str, *, wait: bool = True) -> None:
        """With all that is in it; unless `wait` is false, it is gone when this returns, which takes some seconds."""
        path = f"/api/v1/namespaces/{name}"
        for pod in self.client.call("GET", f"{path}/pods")["items"] if wait else ():
            objects.quietly(self.client, "DELETE", f"{path}/pods/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        objects.quietly(self.client, "DELETE", path)
        if wait:
            wait_until(f"namespace {name} is gone", lambda: not objects.exists(self.client, path), START_S)

    def kubeconfig(
        self,
        user: str = "admin",
        *,
        service_account: str | None = None,
        namespace: str = "default",
        token: str | None = None,
    ) -> Path:
        """A file for this user, with a certificate; or for a service account of the namespace, with its token."""
        cluster = {"server": self.server, "certificate-authority": str(self.control.authority.certificate)}
        if service_account is not None:
            token = token or self.token(service_account, namespace)
            user = f"{namespace}-{service_account}"
        if token is None:
            groups = ("system:masters",) if user == "admin" else ()
            mine = self.control.credentials(user, groups)
            told: Object = {"client-certificate": str(mine.certificate), "client-key": str(mine.key)}
        else:
            told = {"token": token}
        text = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": told}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
        }  # fmt: skip
        directory = self.box / "kubeconfigs"
        directory.mkdir(exist_ok=True)
        file = directory / f"{user}-{namespace}-{uuid.uuid4().hex[:6]}.yaml"
        file.touch(mode=0o600)
        file.write_text(yaml.safe_dump(text))
        return file

    def token(self, service_account: str, namespace: str, *, expired: bool = False) -> str:
        """Of a service account that there is, for an hour; or one whose hour is over."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        told = self.client.call("POST", path, {"spec": {"expirationSeconds": 3600}})
        found = str(told["status"]["token"])
        return self.control.authority.aged(found, 60) if expired else found

    def apply(self, text: str | Object, namespace: str | None = None) -> list[Object]:
        """Makes the objects of a YAML text, in its order, and returns them as the server has them.

        Those that are there already are replaced. Raises Refused.
        """
        documents = yaml.safe_load_all(text) if isinstance(text, str) else [text]
        return [objects.apply(self.client, document, namespace or "default") for document in documents if document]

    def objects(self, namespace: str) -> list[str]:
        """All that is in a namespace, as `pods/name`, but for events and for what every namespace has."""
        return objects.inside(self.client, namespace)

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        query = {"labelSelector": selector} if selector else None
        items: list[Object] = self.client.call("GET", f"/api/v1/namespaces/{namespace}/pods", query=query)["items"]
        return items

    def calls_back(self) -> None:
        """Skips the test where the API server does not reach servers of this process."""

    def share(self, directory: Path) -> None:
        """Makes a directory that every node sees, at its path here, and in which every pod may write."""
        directory.mkdir()
        directory.chmod(0o777)

    def logs(self, namespace: str, pod: str, **query: str) -> str:
        """Through the API server."""
        return self.client.text(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query=query)

    def displace(self, namespace: str, pod: str) -> None:
        """By the Eviction API, as a drain does."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self.client.call("POST", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", body)

    def evict(self, namespace: str, pod: str) -> None:
        """By its kubelet, since the disk of its node is full. When this returns, the disk has room again and the
        kubelet knows: until then it would evict each pod that comes."""
        self._breaks()
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        found = self.client.call("GET", path)
        node = self.nodes[found["spec"]["nodeName"]]
        node.fill(found)
        try:
            wait_until(f"{pod} is evicted", lambda: self._ended(path, found["metadata"]["uid"]), START_S)
        finally:
            node.empty()
        emptied_at = time.time()
        # The condition may be an old one: a kubelet evicts first and reports why some seconds later, or never.
        wait_until(f"{node.name} reports a disk with room", lambda: self._has_room(node.name, emptied_at), START_S)
        wait_until(f"{node.name} takes pods", lambda: self._takes_pods(node.name), START_S)

    def report(self, name: str, capacity: dict[str, str]) -> None:
        """Of a node, that it has these things; as a device plug-in's are counted."""
        self._patch_node(name, {"status": {"capacity": capacity}})
        what = next(iter(capacity))
        wait_until(f"{name} has {what}", lambda: self._has(name, what), START_S)

    def lose_node(self, name: str) -> None:
        """Power loss, and `miss_node`."""
        self.nodes[name].lose()
        self.miss_node(name)

    def miss_node(self, name: str) -> None:
        """Returns when the cluster's controller misses the node, and has reported that for its pods.

        It does after 10 seconds for once, and not after 60. Pods that do not tolerate it longer are told to go after
        a second.
        """
        self._breaks()
        ready = self._ready_pods(name)
        self.control.start_manager(self.kubeconfig(), node_grace_s=10)
        try:
            wait_until(f"{name} is missed", lambda: not self._takes_pods(name), START_S)
            # The manager that is stopped below would take events with it that it has not sent yet.
            wait_until(f"pods of {name} are missed", lambda: ready <= self._missed_pods(), START_S)
        finally:
            self.control.start_manager(self.kubeconfig())

    def find_node(self, name: str) -> None:
        """It is back and ready; what its pods ran is not."""
        self.nodes[name].start()
        wait_until(f"{name} is ready", lambda: self._takes_pods(name), START_S)

    def check(self) -> None:
        """Raises ClusterError where a part that no test has taken away is gone, with all that is wrong, and mends what
        can be mended: whoever comes next may find a cluster that works."""

        def well() -> bool:
            return not health.faults(self.client, self.daemons, self.nodes)

        if comes(well, _HEAL_S):
            return
        found = self.diagnose()
        with (self.box / "mending.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other workers have found the same
            nodes.route_pods(self.network, list(self.nodes.values()))
            self.control.restart_ended(self.kubeconfig())
        raise ClusterError(f"the cluster is not well:\n{found}")

    def diagnose(self) -> str:
        """What is wrong, the pods that have not ended, and the last lines of every log."""
        wrong = health.faults(self.client, self.daemons, self.nodes)
        words = [*wrong, *health.unfinished(self.client)]
        words += [daemon.last_words() for daemon in self.daemons]
        return "\n".join([*words, *(node.last_words() for node in self.nodes.values())])

    def _breaks(self) -> None:
        if not self.alone:
            raise ClusterError("a test that breaks a part of the cluster needs it to itself: @pytest.mark.alone")

    def _all_nodes(self) -> list[Node]:
        """Also those that another program started."""
        return list(self.nodes.values()) or [Node(self.network, index, 1) for index in range(1, _MOST_NODES + 1)]

    def _start_nodes(self, count: int) -> None:
        archives = images.write(self.box / "images")
        (self.box / "spec.json").write_text(json.dumps(images.base_spec()))
        shutil.copy(self.kubeconfig(), self.box / "proxy.yaml")
        made = [Node(self.network, index, count) for index in range(1, count + 1)]
        self.nodes = {node.name: node for node in made}

        def start(node: Node) -> None:
            node.prepare(self.control.authority)
            node.start()
            node.load(archives)

        with ThreadPoolExecutor() as pool:
            list(pool.map(start, made))
        nodes.route_pods(self.network, made)

    def _patch_node(self, name: str, body: Object) -> None:
        kind = "application/strategic-merge-patch+json"
        self.client.call("PATCH", f"/api/v1/nodes/{name}/status", body, content_type=kind)

    def _ready_pods(self, node: str) -> set[str]:
        """The uids of the node's pods that are ready."""
        pods = self.client.call("GET", "/api/v1/pods", query={"fieldSelector": f"spec.nodeName={node}"})["items"]
        conditions = {pod["metadata"]["uid"]: pod["status"].get("conditions") or [] for pod in pods}
        return {
            uid for uid, rows in conditions.items() if any(r["type"] == "Ready" and r["status"] == "True" for r in rows)
        }

    def _missed_pods(self) -> set[str]:
        """The uids of pods whose nodes were reported as not ready."""
        query = {"fieldSelector": "reason=NodeNotReady,involvedObject.kind=Pod"}
        events = self.client.call("GET", "/api/v1/events", query=query)["items"]
        return {event["involvedObject"]["uid"] for event in events}

    def _takes_pods(self, name: str) -> bool:
        taints = self.client.call("GET", f"/api/v1/nodes/{name}")["spec"].get("taints") or []
        return nodes.ready(self.client.call, [name]) and not taints

    def _has_room(self, name: str, since: float) -> bool:
        """Return True when the kubelet reported no DiskPressure after that time."""
        conditions = self.client.call("GET", f"/api/v1/nodes/{name}")["status"]["conditions"]
        pressure = next(each for each in conditions if each["type"] == "DiskPressure")
        reported_at = datetime.datetime.fromisoformat(pressure["lastHeartbeatTime"].replace("Z", "+00:00")).timestamp()
        return pressure["status"] == "False" and reported_at > since

    def _has(self, name: str, what: str) -> bool:
        return what in self.client.call("GET", f"/api/v1/nodes/{name}")["status"]["allocatable"]

    def _ended(self, path: str, uid: str) -> bool:
        try:
            found = self.client.call("GET", path)
            # A controller may have made another of its name meanwhile.
            return found["metadata"]["uid"] != uid or found["status"].get("phase") in ("Succeeded", "Failed")
        except Refused as error:
            if error.status == 404:
                return True
            raise

    def _operators_ready(self) -> bool:
        if not self._operators.alive():
            raise ClusterError(self.diagnose())
        return (self.box / "operators.ready").exists()

    def _served(self, path: str) -> bool:
        """Whether objects of this definition can be listed: the server opens their store when it is first asked."""
        try:
            found = self.client.call("GET", path)
            if not established(found):
                return False
            spec = found["spec"]
            self.client.call("GET", f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}")
        except Refused as error:
            if error.status < 500 and error.status != 429:  # a server that has just begun may lose its store
                raise
            return False
        return True

    def _has_account(self, path: str) -> bool:
        try:
            self.client.call("GET", path)
        except Refused:
            return False
        return True


def claim() -> Kubernetes:
    """A cluster that belongs to this process. What killed owners left is removed, in whichever slot."""
    slot = Slot.claim(_KIND)
    for abandoned in Slot.abandoned(_KIND):
        with Kubernetes(abandoned):
            pass
    cluster = Kubernetes(slot)
    cluster.stop()
    return cluster


def joined(number: int, count: int) -> Kubernetes:
    """The cluster of this slot, of so many nodes, which another process has started."""
    cluster = Kubernetes(Slot(_KIND, number))
    made = [Node(cluster.network, index, count) for index in range(1, count + 1)]
    cluster.nodes = {node.name: node for node in made}
    return cluster


def main(words: Sequence[str]) -> int:
    try:
        absent = lacks() if words[:1] == ["up"] else None
        if absent:
            print(f"{absent[0]} is missing: {absent[1]}", file=sys.stderr)
            return 1
        return _command(Kubernetes(_COMMAND_SLOT), *words)
    except (ClusterError, Refused) as error:
        print(error, file=sys.stderr)
        return 1
    except (TypeError, ValueError, LookupError):
        print(__doc__, file=sys.stderr)
        return 2


def _command(cluster: Kubernetes, verb: str, *words: str) -> int:
    if verb == "up":
        _up(cluster, *words)
    elif verb == "down" and not words:
        cluster.stop()
    elif verb == "kubeconfig" and not words:
        print(cluster.kubeconfig())
    elif verb == "status" and not words:
        for daemon in cluster.daemons:
            print(daemon.name, "up" if daemon.alive() else "down")
    elif verb == "diagnose" and not words:
        print(cluster.diagnose())
    else:
        raise ValueError(verb)
    return 0


def _up(cluster: Kubernetes, *words: str) -> None:
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    (count,) = [int(word) for word in words if not word.startswith("--")] or [2]
    gpus = int(options.pop("gpus", "8"))
    if options:
        raise ValueError(options)
    if not cluster.control.api.alive():
        cluster.start(count, gpus=gpus)
    print(f"export KUBECONFIG={cluster.kubeconfig()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
