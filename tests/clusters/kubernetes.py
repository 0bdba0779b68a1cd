"""A real Kubernetes control plane on this computer, with nodes whose pods are processes, and operators' doubles.

    python -m tests.clusters.kubernetes build        etcd, kube-apiserver, kube-controller-manager; once for all
    python -m tests.clusters.kubernetes up [NODES] [--gpus=N] [--kinds=pytorchjob,jobset,trainjob]
                                                     one that is up is left alone; prints what a client needs
    python -m tests.clusters.kubernetes kubeconfig   the path of the administrator's
    python -m tests.clusters.kubernetes status       which of its programs run
    python -m tests.clusters.kubernetes diagnose     the last lines of every log
    python -m tests.clusters.kubernetes down         ends everything and removes it

etcd, the API server and the controller manager (namespaces, garbage collection, quota, service accounts, node
eviction) are Kubernetes' own. What there is no room for on one computer is played by processes of the project, which
talk to the API server as the real ones do: the scheduler and the kubelets (`kube/node.py`), the training
operator, Trainer, JobSet and the Job controller (`kube/operators.py`). A pod's image means nothing: its command
runs over this computer's files, what it writes is its own, and `python` and `accel` are those of the tests. An image
whose name has `no-such` in it cannot be pulled.

It needs root, and the packages iproute2, util-linux and mount. Everything is found again by names, so that one program
may start a cluster and another end it.
"""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml

from .kube import binaries, objects, webhook
from .kube.client import Client, Object, Refused
from .kube.control import API_PORT, BEFORE_INDEXED, ControlPlane, Daemon
from .kube.crds import INSTALLED, definitions, established, stored_kinds
from .kube.node import KUBELET_PORT, NodeShape, Shape
from .kube.sandbox import TOOLS
from .netns import ClusterError, Network, Slot, call, lacking, wait_until

ROOT = Path(__file__).parents[2]
START_S = 120.0
_KIND, _SECOND_OCTET = "ak", 83
_COMMAND_SLOT = Slot(_KIND, 250)
_CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "100", "ephemeral-storage": "100Gi"}
_ISOLATED = "unshare --mount --pid --fork --kill-child --mount-proc --propagation private"
_MOST_NODES = 5


def lacks() -> tuple[str, str] | None:
    """What this computer lacks for a cluster, and the remedy."""
    return lacking(**TOOLS) or binaries.lacking()


class Kubernetes:
    """One cluster. To be stopped; a `with` does it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.box = slot.box
        self.network = Network(slot, _SECOND_OCTET)
        self.control = ControlPlane(self.box, self.network.address(0))
        self._own = Daemon("node", self.box), Daemon("operators", self.box)
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
        return (self.control.etcd, self.control.api, self.control.controllers, *self._own)

    @property
    def client(self) -> Client:
        """The administrator's."""
        if self._client is None:
            self._client = self.control.client()
        return self._client

    def start(self, nodes: int = 2, *, gpus: int = 8, kinds: Sequence[str] = INSTALLED) -> None:
        """`nodes` nodes, n1 and so on, with 16 CPUs, 64 GiB and `gpus` seeming GPUs each; and these operators.

        Raises ClusterError, with what the programs said last.
        """
        if not 1 <= nodes <= _MOST_NODES:
            raise ClusterError(f"between 1 and {_MOST_NODES} nodes, not {nodes}")
        self.stop()
        self.box.mkdir(mode=0o711)
        self.network.up()
        shape = self._shape(nodes, gpus)
        for node in shape.nodes:
            call("ip", "addr", "add", f"{node.address}/24", "dev", self.network.bridge)
        self.control.create()
        for node in shape.nodes:
            self.control.authority.issue(node.name, ("system:nodes",), [node.address])
        shape.save(self.box / "nodes.json")
        self.control.start_etcd()
        if self.control.minor < BEFORE_INDEXED:
            for key, definition in stored_kinds():
                self.control.put(key, definition)
        self._start_programs()  # they wait for the server, and have all imported by then
        self.control.start_api()
        self.install(kinds)
        self.control.start_controllers(self.kubeconfig())
        for daemon in self._own:
            wait_until(f"{daemon.name} is ready ({daemon.log})", partial(self._is_ready, daemon), START_S)

    def stop(self) -> None:
        """Ends every process of the cluster and removes all that there was."""
        for file in self.box.glob("*.pid"):
            Daemon(file.stem, self.box).stop()
        if self._client is not None:
            self._client.close()
            self._client = None
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
            wait_until(f"{place} is served", partial(self._established, place), START_S)
        if "trainjob" in kinds:
            hook = webhook.configuration(self.control.address, self.control.authority.certificate.read_bytes())
            objects.create(self.client, webhook.CONFIGURATIONS, hook)

    def stop_api(self) -> None:
        """SIGKILL: connections are cut, and new ones refused."""
        self.control.api.stop()

    def start_api(self) -> None:
        """Nothing when it runs; it is ready when this returns."""
        self.control.start_api()

    def restart_api(self) -> None:
        self.stop_api()
        self.start_api()

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
        wait_until(f"{name} has its service account", lambda: self._has_token(path), START_S)
        return name

    def remove_namespace(self, name: str, *, wait: bool = True) -> None:
        """With all that is in it; unless `wait` is false, it is gone when this returns, which takes some seconds."""
        path = f"/api/v1/namespaces/{name}"
        for pod in self.client.call("GET", f"{path}/pods")["items"]:
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

    def logs(self, namespace: str, pod: str, **query: str) -> str:
        """Through the API server."""
        return self.client.text(f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query=query)

    def evict(self, namespace: str, pod: str, message: str = "The node was low on resource: memory. ") -> None:
        """By the kubelet, as when its node runs out of something."""
        self._command(verb="evict", namespace=namespace, pod=pod, message=message)

    def oom_kill(self, namespace: str, pod: str, container: str | None = None) -> None:
        self._command(verb="oom", namespace=namespace, pod=pod, container=container)

    def lose_node(self, name: str) -> None:
        """Power loss: its processes are gone, nothing is heard of it, and its pods are told to go after a second."""
        self._command(verb="lose", node=name)

    def find_node(self, name: str) -> None:
        """It is back, ready, and gives up the pods that were told to go."""
        self._command(verb="find", node=name)

    def diagnose(self) -> str:
        """The last lines of every log."""
        return "\n".join(daemon.last_words() for daemon in self.daemons)

    def _start_programs(self) -> None:
        """A process table and mounts of their own: nothing of a pod outlives these."""
        for daemon in self._own:
            module = f"tests.clusters.kube.{daemon.name}"
            daemon.start([*_ISOLATED.split(), "env", "-C", ROOT, sys.executable, "-m", module, self.box])

    def _is_ready(self, daemon: Daemon) -> bool:
        if not daemon.alive():
            raise ClusterError(self.diagnose())
        return (self.box / f"{daemon.name}.ready").exists()

    def _shape(self, nodes: int, gpus: int) -> Shape:
        address = self.network.address(0)
        subnet = address.rpartition(".")[0]
        capacity = {**_CAPACITY, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"} if gpus else {}
        made = [
            NodeShape(name=f"n{index}", address=f"{subnet}.{index + 1}", capacity=capacity, labels=labels)
            for index in range(1, nodes + 1)
        ]
        return Shape(
            server=self.server, api_address=address, api_port=API_PORT, bridge=self.network.bridge,
            cable=f"{self.slot.tag}v", subnet=subnet, nodes=tuple(made),
        )  # fmt: skip

    def _command(self, **told: object) -> None:
        first = Shape.load(self.box / "nodes.json").nodes[0]
        server = f"https://{first.address}:{KUBELET_PORT}"
        client = Client(server, self.control.authority.certificate, self.control.admin)
        try:
            client.call("POST", "/command", told)
        except Refused as error:
            raise ClusterError(str(error)) from None
        finally:
            client.close()

    def _established(self, path: str) -> bool:
        try:
            return established(self.client.call("GET", path))
        except Refused as error:
            if error.status < 500:  # a server that has just begun may lose its store for a moment
                raise
            return False

    def _has_token(self, path: str) -> bool:
        try:
            account = self.client.call("GET", path)
        except Refused:
            return False
        return bool(account.get("secrets")) or self.control.minor >= BEFORE_INDEXED


def claim() -> Kubernetes:
    """A cluster that belongs to this process. What killed owners left is removed, in whichever slot."""
    slot = Slot.claim(_KIND)
    for abandoned in Slot.abandoned(_KIND):
        with Kubernetes(abandoned):
            pass
    cluster = Kubernetes(slot)
    cluster.stop()
    return cluster


def main(words: Sequence[str]) -> int:
    try:
        if list(words) == ["build"]:
            return binaries.main()
        absent = lacks()
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
    kinds = options.pop("kinds", ",".join(INSTALLED)).split(",")
    if options:
        raise ValueError(options)
    if not cluster.control.api.alive():
        cluster.start(count, gpus=gpus, kinds=[kind for kind in kinds if kind])
    print(f"export KUBECONFIG={cluster.kubeconfig()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
