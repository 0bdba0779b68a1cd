"""The nodes of a Kubernetes cluster of the tests: machines with containerd, a kubelet and kube-proxy.

A node is a machine of `netns.py`: network, processes and mounts of its own. Ending its first process ends everything
on it, containers and mounts too. Its disk outlives that, but for /run and the kubelet's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..netns import ClusterError, Machine, Network, call, spawn, wait_until
from . import programs
from .images import SANDBOX
from .pki import Authority

PROGRAMS = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "iptables": "iptables", "conntrack": "conntrack",
    "cc": "gcc libc6-dev",
}  # fmt: skip
PLUGINS = Path("/usr/lib/cni")
_CGROUPS = Path("/sys/fs/cgroup")
_START_S = 120.0
# A node whose disk is this full evicts pods: little enough to be filled within a moment.
DISK_MB, _FREE = 320, "25%"
_BOOT = """\
set -e
mount --make-rshared /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /var/lib/kubelet /var/lib/cni
mount -t tmpfs -o size={disk}m,mode=755 tmpfs /var/lib/kubelet
mount -t tmpfs -o mode=755 tmpfs /var/lib/cni
mkdir -p {own}/log/pods {own}/log/containers
mount --bind {own}/log /var/log
mount --bind {own}/resolv.conf /etc/resolv.conf
echo 1 >/proc/sys/net/ipv4/ip_forward
{routes}
exec sleep infinity
"""
_CONTAINERD = """\
version = 2
root = "{own}/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox}"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE runc may not set -998, and no sandbox would start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{own}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{spec}"
"""


class Node:
    """One node. What it shall do with its pods, it hears from the API server."""

    def __init__(self, network: Network, index: int, count: int) -> None:
        self.name = f"n{index}"
        self.machine = Machine(network, index, self.name, self._boot)
        self.pods = _subnet(network, index)
        self.others = {
            _subnet(network, other): network.address(other) for other in range(1, count + 1) if other != index
        }
        self._gateway = network.address(0)
        self._box = network.slot.box
        self._cgroup = f"accel-{network.slot.tag}-{self.name}"

    @property
    def address(self) -> str:
        return self.machine.address

    @property
    def own(self) -> Path:
        return self.machine.own

    def prepare(self, authority: Authority) -> None:
        """Writes what its programs read."""
        for directory in ("cni", "log"):
            (self.own / directory).mkdir(parents=True, exist_ok=True)
        authority.issue(f"system:node:{self.name}", ("system:nodes",))
        authority.issue(f"kubelet-{self.name}", (), [self.address], [self.name])
        self._kubeconfig(authority)
        (self.own / "resolv.conf").write_text(f"nameserver {self._gateway}\n")
        text = _CONTAINERD.format(own=self.own, sandbox=SANDBOX, plugins=PLUGINS, spec=self._box / "spec.json")
        (self.own / "containerd.toml").write_text(text)
        (self.own / "cni/10-pods.conflist").write_text(json.dumps(self._pod_network()))
        (self.own / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet(authority)))
        (self.own / "proxy.yaml").write_text(yaml.safe_dump(self._proxy()))

    def start(self) -> None:
        """Power on: containerd first, then the kubelet. Nothing when it is on."""
        if self.machine.alive():
            return
        self._make_cgroups()
        self.machine.start()
        wait_until(f"{self.name} is up", self._booted, _START_S)
        self.start_containerd()
        directory = programs.directory()
        kubelet: list[str | Path] = [
            directory / "kubelet", f"--config={self.own}/kubelet.yaml", f"--kubeconfig={self.own}/kubeconfig.yaml",
            f"--hostname-override={self.name}", f"--node-ip={self.address}", "--cert-dir=/run/kubelet-pki",
        ]  # fmt: skip
        self._spawn("kubelet", kubelet)
        self._spawn("kube-proxy", [directory / "kube-proxy", f"--config={self.own}/proxy.yaml"])

    def start_containerd(self) -> None:
        self._spawn("containerd", ["containerd", "-c", self.own / "containerd.toml"])
        wait_until(f"containerd of {self.name} answers", partial(self._answers, "version"), _START_S)

    def load(self, archives: Sequence[Path]) -> None:
        """Images, which are there from then on."""
        for archive in archives:
            self.ctr("images", "import", str(archive))

    def ctr(self, *words: str) -> str:
        return self.machine.run("ctr", "-a", "/run/containerd.sock", "-n", "k8s.io", *words)

    def signal(self, program: str, number: signal.Signals) -> None:
        """To the processes of this name on the node: SIGSTOP freezes a kubelet, SIGKILL ends containerd."""
        found = self.machine.processes(program)
        if not found:
            raise ClusterError(f"no {program} runs on {self.name}")
        for process in found:
            process.send(number)
            if number == signal.SIGCONT:  # nsenter stops with its child, and continues it
                os.kill(int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]), number)
            if number == signal.SIGKILL:
                process.wait(20)

    def lose(self) -> None:
        """Power loss."""
        self.machine.kill()

    def fill(self, pod: Mapping[str, Any]) -> None:
        """Fills the node's disk, most of it with what this pod seems to have written: it is the first to be evicted."""
        metadata = pod["metadata"]
        logs = self.own / "log/pods" / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid']}"
        (logs / "filler.log").write_bytes(bytes(8 << 20))
        self.machine.run("fallocate", "-l", f"{DISK_MB - 40}M", "/var/lib/kubelet/filler")

    def empty(self) -> None:
        """Frees what `fill` took."""
        self.machine.run("rm", "-f", "/var/lib/kubelet/filler")
        for each in (self.own / "log/pods").glob("*/filler.log"):
            each.unlink(missing_ok=True)

    def end(self) -> None:
        """Power off, and nothing of it is left in the kernel."""
        # A container that was being frozen when runc was killed would hear no signal.
        for name in ("kubelet", "containerd", "containerd-shim", "runc"):
            for process in self.machine.processes(name):
                process.send(signal.SIGKILL)
        for file in (_CGROUPS / "freezer" / self._cgroup).rglob("freezer.state"):
            with contextlib.suppress(OSError):
                file.write_text("THAWED")
        self.machine.end()
        for place in (_CGROUPS, *_controllers()):
            top = place / self._cgroup
            if top.is_dir():
                directories = [top, *(each for each in top.rglob("*") if each.is_dir())]
                for each in sorted(directories, key=lambda each: -len(each.parts)):
                    with contextlib.suppress(OSError):
                        each.rmdir()

    def last_words(self, lines: int = 5) -> str:
        found = []
        for name in ("containerd", "kubelet", "kube-proxy"):
            log = self._log(name)
            text = log.read_text(errors="replace").splitlines() if log.exists() else []
            found += [f"== {name} of {self.name}", *text[-lines:]]
        return "\n".join(found)

    def _boot(self, machine: Machine) -> str:
        routes = [f"ip route replace default via {self._gateway}"]
        routes += [f"ip route replace {pods} via {address}" for pods, address in self.others.items()]
        return _BOOT.format(own=machine.own, disk=DISK_MB, routes="\n".join(routes))

    def _booted(self) -> bool:
        try:
            return "10.99" in self.machine.run("sh", "-c", "ip route get 10.99.0.1; mountpoint -q /var/log")
        except ClusterError:
            return False

    def _answers(self, *words: str) -> bool:
        try:
            self.ctr(*words)
        except ClusterError:
            return False
        return True

    def _spawn(self, name: str, argv: Sequence[str | Path]) -> None:
        spawn(self.machine.argv(*map(str, argv)), self._log(name))

    def _log(self, name: str) -> Path:
        return self._box / "log" / f"{name}-{self.name}.txt"

    def _make_cgroups(self) -> None:
        """Of cgroup v1 a directory for each controller, since the kubelet makes none of its root."""
        for controller in _controllers():
            (controller / self._cgroup).mkdir(exist_ok=True)
            if controller.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (controller / self._cgroup / file).write_text((controller / file).read_text())
        if not _controllers():
            (_CGROUPS / self._cgroup).mkdir(exist_ok=True)

    def _kubeconfig(self, authority: Authority) -> None:
        mine = authority.directory / f"system_node_{self.name}.crt"
        told = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {
                "server": f"https://{self._gateway}:6443", "certificate-authority": str(authority.certificate)}}],
            "users": [{"name": "u", "user": {
                "client-certificate": str(mine), "client-key": str(mine.with_suffix(".key"))}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        (self.own / "kubeconfig.yaml").write_text(yaml.safe_dump(told))

    def _pod_network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local", "dataDir": f"{self.own}/ipam", "ranges": [[{"subnet": self.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }  # fmt: skip
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}

    def _kubelet(self, authority: Authority) -> dict[str, Any]:
        serving = authority.directory / f"kubelet-{self.name}.crt"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {
                "x509": {"clientCAFile": str(authority.certificate)}, "webhook": {"enabled": True},
                "anonymous": {"enabled": False}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving), "tlsPrivateKeyFile": str(serving.with_suffix(".key")),
            "clusterDNS": [self._gateway], "clusterDomain": "cluster.local", "resolvConf": f"{self.own}/resolv.conf",
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self._cgroup}", "failCgroupV1": False, "failSwapOn": False,
            "containerRuntimeEndpoint": "unix:///run/containerd.sock",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": _FREE, "imagefs.available": "1%"},
            "evictionPressureTransitionPeriod": "1s",
            "imageGCHighThresholdPercent": 99, "imageGCLowThresholdPercent": 98,
            "nodeStatusUpdateFrequency": "5s", "nodeLeaseDurationSeconds": 8,
            "registryPullQPS": 50, "registryBurst": 100,
            # A container that fails is started again after 2 seconds; otherwise after 10, 20, 40 …
            "featureGates": {"KubeletCrashLoopBackOffMax": True},
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        }  # fmt: skip

    def _proxy(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
            "clientConnection": {"kubeconfig": str(self._box / "proxy.yaml")}, "hostnameOverride": self.name,
            "conntrack": {"maxPerCore": 0, "min": 0},
        }  # fmt: skip


def lacking_plugins() -> tuple[str, str] | None:
    if (PLUGINS / "bridge").exists():
        return None
    name = "containernetworking-plugins"
    return name, f"apt-get install --no-install-recommends {name}"


def route_pods(network: Network, nodes: Sequence[Node]) -> None:
    """From this computer, where the name server answers."""
    for node in nodes:
        call("ip", "route", "replace", node.pods, "via", node.address)


def _subnet(network: Network, index: int) -> str:
    """The pods' addresses on a node: a quarter of the network next to the machines' own."""
    first, second, third, _ = network.address(0).split(".")
    return f"{first}.{int(second) + 1}.{third}.{64 * (index - 1)}/26"


def _controllers() -> list[Path]:
    """The directories of cgroup v1; none where there is v2."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return []
    return [each for each in _CGROUPS.iterdir() if each.is_dir() and not each.is_symlink() and each.name != "unified"]


def ready(client_call: Any, names: Sequence[str]) -> bool:
    items = client_call("GET", "/api/v1/nodes")["items"]
    conditions = {item["metadata"]["name"]: item["status"].get("conditions") or [] for item in items}
    return all(
        any(each["type"] == "Ready" and each["status"] == "True" for each in conditions.get(name, [])) for name in names
    )
