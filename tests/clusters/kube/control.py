"""The control plane of a Kubernetes cluster of the tests: etcd, API server, controllers, scheduler, name server."""

from __future__ import annotations

import base64
import http.client
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import urllib3

from ..netns import ClusterError, remembered, spawn, wait_until
from . import programs
from .client import Client, Credentials, Refused
from .pki import Authority

API_PORT = 6443
_ETCD_PORT, _PEER_PORT = 2379, 2380
_START_S = 120.0
_GARBAGE = "400"  # Go's collector took a quarter of a busy API server's time; there is memory enough
# Who names a service, from within a pod; the API server has the first address of the range.
_NAMES_OF_API = tuple(f"kubernetes{end}" for end in ("", ".default", ".default.svc"))
SERVICES = "10.99.0.0/16"
_CORE_FILE = """\
.:53 {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 30
  }}
  cache 30
}}
"""


class Daemon:
    """A process that outlives whoever starts it, found again by a file."""

    def __init__(self, name: str, box: Path) -> None:
        self.name = name
        self.log = box / "log" / f"{name}.txt"
        self._file = box / f"{name}.pid"

    def alive(self) -> bool:
        process = remembered(self._file)
        return process is not None and process.alive()

    def start(self, argv: Sequence[str | Path]) -> None:
        self.log.parent.mkdir(exist_ok=True)
        self._file.write_text(str(spawn([str(word) for word in argv], self.log, GOGC=_GARBAGE)))

    def stop(self) -> None:
        """SIGKILL. The process is gone when this returns."""
        process = remembered(self._file)
        if process is not None:
            process.send(signal.SIGKILL)
            if not process.wait(20):
                raise ClusterError(f"{self.name}: process {process.pid} does not end")
        self._file.unlink(missing_ok=True)

    def send(self, number: signal.Signals) -> None:
        process = remembered(self._file)
        if process is None or not process.alive():
            raise ClusterError(f"{self.name} does not run")
        process.send(number)

    def last_words(self, lines: int = 5) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"== {self.name}", *text[-lines:]])


class ControlPlane:
    """On one address of this computer, which must be there; everything it writes stands in `box`."""

    def __init__(self, box: Path, address: str) -> None:
        self.box = box
        self.address = address
        self.server = f"https://{address}:{API_PORT}"
        self.authority = Authority(box / "pki")
        self.etcd, self.api = Daemon("etcd", box), Daemon("kube-apiserver", box)
        self.controllers, self.scheduler = Daemon("kube-controller-manager", box), Daemon("kube-scheduler", box)
        self.names = Daemon("coredns", box)
        self._etcd_url = f"http://{address}:{_ETCD_PORT}"

    def credentials(self, user: str, groups: Sequence[str] = ()) -> Credentials:
        file = self.authority.directory / f"{user.replace(':', '_')}.crt"
        if not file.exists():
            self.authority.issue(user, groups)
        return Credentials(file, file.with_suffix(".key"))

    @property
    def admin(self) -> Credentials:
        return self.credentials("admin", ("system:masters",))

    def client(self) -> Client:
        return Client(self.server, self.authority.certificate, self.admin)

    def create(self) -> None:
        self.authority.create()
        self.authority.issue("server", (), [self.address, "127.0.0.1", "10.99.0.1"], _NAMES_OF_API)
        self.credentials("kubelet-client", ("system:masters",))

    def start_etcd(self) -> None:
        peer = f"http://{self.address}:{_PEER_PORT}"
        words = {
            "data-dir": f"{self.box}/etcd", "unsafe-no-fsync": "true", "log-level": "error",
            "listen-client-urls": self._etcd_url, "advertise-client-urls": self._etcd_url,
            "listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}",
        }  # fmt: skip
        self.etcd.start([self._program("etcd"), *_options(words)])
        wait_until(f"etcd answers ({self.etcd.log})", self._etcd_answers, _START_S)

    def start_api(self) -> None:
        """Nothing when it runs; it is ready when this returns."""
        client = self.client()

        def ready() -> bool:
            if not self.api.alive():  # also where it gave up because its port was not free at once
                self.api.start([self._program("kube-apiserver"), *_options(self._api_options())])
            return self._ready(client)

        try:
            wait_until(f"the API server is ready ({self.api.log})", ready, _START_S)
        finally:
            client.close()

    def start_controllers(self, kubeconfig: Path) -> None:
        """Kubernetes' own controllers, the scheduler and the cluster's name server."""
        self.start_manager(kubeconfig)
        self._start_scheduler(kubeconfig)
        self._start_names(kubeconfig)

    def _start_scheduler(self, kubeconfig: Path) -> None:
        words = {**_client(kubeconfig), "secure-port": "0"}
        self.scheduler.start([self._program("kube-scheduler"), *_options(words)])

    def _start_names(self, kubeconfig: Path) -> None:
        config = self.box / "Corefile"
        config.write_text(_CORE_FILE.format(address=self.address, kubeconfig=kubeconfig))
        self.names.start([self._program("coredns"), "-conf", config])

    def restart_ended(self, kubeconfig: Path) -> None:
        """Those of `start_controllers` that have ended."""
        if not self.controllers.alive():
            self.start_manager(kubeconfig)
        if not self.scheduler.alive():
            self._start_scheduler(kubeconfig)
        if not self.names.alive():
            self._start_names(kubeconfig)

    def start_manager(self, kubeconfig: Path, *, node_grace_s: int = 60) -> None:
        """The controllers, in place of those that run; they miss a node that is silent for so long."""
        self.controllers.stop()
        words = {
            **_client(kubeconfig), "secure-port": "0",
            "service-account-private-key-file": str(self.authority.token_key),
            "root-ca-file": str(self.authority.certificate),
            "node-monitor-period": "1s", "node-monitor-grace-period": f"{node_grace_s}s",
        }  # fmt: skip
        self.controllers.start([self._program("kube-controller-manager"), *_options(words)])

    def compact(self) -> None:
        """Forgets all past revisions."""
        told = self._etcd("kv/range", {"key": _base64(b"/"), "limit": 1})
        header = told["header"]
        assert isinstance(header, dict)
        self._etcd("kv/compaction", {"revision": header["revision"], "physical": True})

    def _etcd(self, verb: str, body: Mapping[str, object]) -> dict[str, object]:
        request = urllib.request.Request(f"{self._etcd_url}/v3/{verb}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ClusterError(f"etcd: {verb}: {error.read().decode(errors='replace')}") from None
        assert isinstance(told, dict)
        return told

    def _etcd_answers(self) -> bool:
        if not self.etcd.alive():
            raise ClusterError(self.etcd.last_words())
        try:
            with urllib.request.urlopen(f"{self._etcd_url}/health", timeout=5) as answer:
                return b"true" in answer.read()
        except (OSError, http.client.HTTPException):
            return False

    def _ready(self, client: Client) -> bool:
        if not self.api.alive():
            raise ClusterError(self.api.last_words())
        try:
            return client.text("/readyz") == "ok"
        except (Refused, urllib3.exceptions.HTTPError):
            return False

    def _api_options(self) -> dict[str, str]:
        pki = self.authority.directory
        return {
            "etcd-servers": self._etcd_url, "bind-address": self.address, "advertise-address": self.address,
            "secure-port": str(API_PORT), "service-cluster-ip-range": SERVICES,
            "tls-cert-file": f"{pki}/server.crt", "tls-private-key-file": f"{pki}/server.key",
            "client-ca-file": str(self.authority.certificate), "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": str(self.authority.token_key),
            "service-account-key-file": str(self.authority.token_public_key),
            "kubelet-certificate-authority": str(self.authority.certificate),
            "kubelet-client-certificate": f"{pki}/kubelet-client.crt",
            "kubelet-client-key": f"{pki}/kubelet-client.key",
            "kubelet-preferred-address-types": "InternalIP", "allow-privileged": "true", "event-ttl": "1h",
            # A pod leaves a lost node soon: 300 seconds otherwise.
            "default-not-ready-toleration-seconds": "1", "default-unreachable-toleration-seconds": "1",
            "max-requests-inflight": "2000", "max-mutating-requests-inflight": "1000", "shutdown-delay-duration": "0s",
            "enable-priority-and-fairness": "false",
            # A webhook is called at the addresses of its Service: no kube-proxy runs here.
            "enable-aggregator-routing": "true",
        }  # fmt: skip

    def _program(self, name: str) -> Path:
        return programs.directory([name]) / name


def _client(kubeconfig: Path) -> dict[str, str]:
    return {"kubeconfig": str(kubeconfig), "leader-elect": "false", "kube-api-qps": "500", "kube-api-burst": "1000"}


def _options(words: Mapping[str, str]) -> list[str]:
    return [f"--{key}={value}" for key, value in words.items()]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
