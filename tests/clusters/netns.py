"""Machines out of Linux namespaces: own network, host name, process table, mounts and /dev/shm, on one bridge.

A machine is ended by killing the process that holds its PID namespace: everything in it goes with it. Everything is
found again by name and by process identity, so that one program may start machines and another end them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedulers.processes import Identity
from tests.waiting import comes

BOXES = Path("/tmp")  # a short path: that of a unix socket may have 107 characters
_SLOTS = range(1, 200)
_WAIT_S = 180.0
# The second byte of addresses, by the kind of slot. Those of Kubernetes' pods have 84, and are routed from here too.
_SECOND_BYTES = {"as": 77, "aw": 78, "ak": 83, "sm": 85, "dk": 87}

_RUN = 'setsid "$@" </dev/null >>"$LOG" 2>&1 & echo $!'


class ClusterError(Exception):
    """A machine could not be made or did not answer."""


def lacking(**programs: str) -> tuple[str, str] | None:
    """What this computer lacks for machines, and the remedy. `programs` is a command -> its Debian package."""
    if sys.platform != "linux":
        return "Linux", "namespaces are a feature of its kernel"
    if os.geteuid() != 0:
        return "root", "namespaces and bridges need it: run the tests as root"
    needed = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", **programs}
    absent = sorted({package for command, package in needed.items() if _which(command) is None})
    if absent:
        return ", ".join(absent), f"apt-get install --no-install-recommends {' '.join(absent)}"
    tried = subprocess.run("unshare --net --uts --mount --pid --fork true".split(), capture_output=True, env=_env())
    if tried.returncode != 0:
        return "the right to make namespaces", "containers have it with --privileged"
    return None


def _which(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def call(*argv: str | Path, text: str = "") -> str:
    """Runs a command that must work and returns what it printed. Raises ClusterError with what it said."""
    done = subprocess.run([str(word) for word in argv], input=text, capture_output=True, text=True, env=_env())
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(map(str, argv))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def spawn(argv: Sequence[str], log: Path, **env: str) -> Identity:
    """Starts a process that is nobody's child: it outlives whoever starts it. Raises ClusterError when it ends at once.

    What it prints is added to `log`.
    """
    env = {**_env(), **env, "LOG": str(log)}
    done = subprocess.run(["sh", "-c", _RUN, "sh", *argv], stdout=subprocess.PIPE, text=True, env=env, check=True)
    identity = Identity.of(int(done.stdout))
    if identity is None:
        raise ClusterError(f"{argv[0]} ended at once: {log}")
    return identity


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def wait_until(what: str, true: Callable[[], bool], timeout_s: float = _WAIT_S) -> None:
    """Raises ClusterError when it has not come true in time."""
    if not comes(true, timeout_s):
        raise ClusterError(f"{what}: not within {timeout_s:g} s")


@dataclass(frozen=True)
class Slot:
    """A number from which names and addresses are made, so that clusters on one computer do not meet.

    A claimed slot belongs to the process that claimed it, until it ends; its number is then free again.
    """

    kind: str  # two letters at most: the names of interfaces have 15 characters
    number: int
    lock: int | None = None

    @classmethod
    def claim(cls, kind: str) -> Slot:
        for number in _SLOTS:
            slot = cls.take(kind, number)
            if slot is not None:
                return slot
        raise ClusterError("no free slot for a cluster")

    @classmethod
    def take(cls, kind: str, number: int) -> Slot | None:
        """This very slot; None while it belongs to a process."""
        lock = os.open(BOXES / f".accel-{kind}{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return cls(kind, number, lock)

    @classmethod
    def abandoned(cls, kind: str) -> Iterator[Slot]:
        """The slots, now this process's, whose owners ended without cleaning up."""
        for number in _SLOTS:
            if cls(kind, number).box.exists():
                slot = cls.take(kind, number)
                if slot is not None:
                    yield slot

    def release(self) -> None:
        if self.lock is not None:
            os.close(self.lock)

    @property
    def tag(self) -> str:
        return f"{self.kind}{self.number}"

    @property
    def box(self) -> Path:
        return BOXES / f"accel-{self.tag}"


class Network:
    """A bridge with this computer on it as `.1`, and machines from `.11` on; IPv6 beside IPv4."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.bridge = f"{slot.tag}br"
        second = _SECOND_BYTES[slot.kind]
        self._subnet = f"10.{second}.{slot.number}"
        self._prefix6 = f"fd00:{second:x}:{slot.number:x}"

    def address(self, index: int) -> str:
        """Of machine `index`, counted from 1; 0 is this computer."""
        return f"{self._subnet}.{index + 10 if index else 1}"

    def address6(self, index: int) -> str:
        return f"{self._prefix6}::{index + 10 if index else 1}"

    def up(self) -> None:
        if os.path.exists(f"/sys/class/net/{self.bridge}"):
            return
        batch = [
            f"link add {self.bridge} type bridge",
            f"addr add {self.address(0)}/24 dev {self.bridge}",
            f"addr add {self.address6(0)}/64 dev {self.bridge} nodad",
            f"link set {self.bridge} up",
        ]
        call("ip", "-batch", "-", text="\n".join(batch))

    def down(self) -> None:
        """Takes away the bridge and every network namespace and interface of this slot. Machines must be dead."""
        tag = self.slot.tag
        for namespace in Path("/run/netns").glob(f"{tag}-*"):
            call("ip", "netns", "del", namespace.name)
        interfaces = [*Path("/sys/class/net").glob(f"{tag}v*"), Path("/sys/class/net", self.bridge)]
        for interface in interfaces:
            if interface.exists():
                # With its namespace goes an interface's other end, and so, a little later, itself.
                subprocess.run(["ip", "link", "del", interface.name], capture_output=True, env=_env())


class Machine:
    """One machine. `boot` is the text of the shell script that its first process runs; it must not end."""

    def __init__(self, network: Network, index: int, name: str, boot: Callable[[Machine], str]) -> None:
        self.network = network
        self.index = index
        self.name = name
        self.address = network.address(index)
        self.address6 = network.address6(index)
        self._boot = boot
        self._box = network.slot.box
        self._namespace = f"{network.slot.tag}-{name}"
        self._cable = f"{network.slot.tag}v{index}"

    @property
    def log(self) -> Path:
        return self._box / "log" / f"{self.name}.txt"

    @property
    def own(self) -> Path:
        """What only this machine has on its disk; the rest of the file system is shared, as over NFS."""
        return self._box / "nodes" / self.name

    def alive(self) -> bool:
        holder = self._holder()
        return holder is not None and holder.alive()

    def start(self) -> None:
        """Power on; nothing when it is on."""
        if self.alive():
            return
        self._wire()
        self.own.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(exist_ok=True)
        script = self.own / "boot.sh"
        script.write_text(self._boot(self))
        argv = ["nsenter", f"--net=/run/netns/{self._namespace}"]
        argv += "unshare --uts --mount --pid --fork --kill-child --mount-proc /bin/sh".split()
        self._remember([*argv, str(script)], self._pid_file)

    def kill(self) -> None:
        """Power loss: the cable first, so that no peer hears of it."""
        if self.alive():
            self.link(False)
        self.crash()

    def crash(self) -> None:
        """Ends every process with the network up: the kernel closes their sockets, and peers hear of that."""
        holder = self._holder()
        if holder is not None:
            first = self._first(holder)
            holder.send(signal.SIGKILL)
            # With its first process all others have ended, and hold their ports no more.
            if not (holder.wait(60) and (first is None or first.wait(60))):
                raise ClusterError(f"{self.name}: process {holder.pid} does not end")
        self._pid_file.unlink(missing_ok=True)

    @staticmethod
    def _first(holder: Identity) -> Identity | None:
        """The process with the number 1 on the machine."""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            return Identity.of(int(children[0])) if children else None
        return None

    def link(self, up: bool) -> None:
        """Plugs the cable in or pulls it: packets vanish, nobody is told."""
        call("ip", "link", "set", self._cable, "up" if up else "down")

    def argv(self, *argv: str) -> list[str]:
        """The command that runs `argv` on the machine, without a server on it. Raises ClusterError when it is off."""
        holder = self._holder()
        if holder is None or not holder.alive():
            raise ClusterError(f"{self.name} is down")
        first = self._first(holder)
        if first is None:
            raise ClusterError(f"{self.name} is just starting")
        return ["nsenter", "-t", str(first.pid), "--net", "--uts", "--mount", "--pid", "--", *argv]

    def run(self, *argv: str) -> str:
        return call(*self.argv(*argv))

    def own_name(self, address: str) -> None:
        """What its own /etc/hosts says of its name, until it is off; as installers write it, 127.0.1.1."""
        others = [line for line in self.run("cat", "/etc/hosts").splitlines() if line.split()[1:2] != [self.name]]
        own = self.own / "hosts"
        own.write_text("\n".join([f"{address} {self.name}", *others, ""]))
        self.run("mount", "--bind", str(own), "/etc/hosts")

    def processes(self, command: str = "") -> list[Identity]:
        """The live processes of the machine, or those of this name; as this computer numbers them."""
        if not self.alive():
            return []
        inside = os.readlink(f"/proc/{self.argv()[2]}/ns/pid")
        found: list[Identity] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                same = os.readlink(entry / "ns/pid") == inside
                if same and command in ("", (entry / "comm").read_text().rstrip("\n")):
                    identity = Identity.of(int(entry.name))
                    found += [identity] if identity is not None else []
        return found

    def second_nic(self, name: str, address: str) -> None:
        """A network interface that leads nowhere: its address answers on this machine and on no other."""
        batch = f"link add {name} type bridge\naddr add {address} dev {name}\nlink set {name} up"
        call("ip", "-n", self._namespace, "-batch", "-", text=batch)

    def drop_nic(self, name: str) -> None:
        subprocess.run(["ip", "-n", self._namespace, "link", "del", name], capture_output=True, env=_env())

    def delay(self, milliseconds: float) -> None:
        """Every frame takes this long, each way; 0 ends that. By a relay in user space: kernels may lack netem."""
        tap = f"{self.network.slot.tag}t{self.index}"
        relay = remembered(self._relay_file)
        if relay is not None:
            relay.send(signal.SIGKILL)
            relay.wait(5)
            self._relay_file.unlink()
        call("ip", "link", "set", self._cable, "promisc", "off", "master", self.network.bridge)
        if not milliseconds:
            return
        call(*self.argv(sys.executable, str(Path(__file__).with_name("relay.py")), "offload-off", "eth0"))
        call("ip", "link", "set", self._cable, "nomaster", "promisc", "on")
        relay_py = str(Path(__file__).with_name("relay.py"))
        self._remember([sys.executable, relay_py, tap, self._cable, str(milliseconds)], self._relay_file)
        wait_until(f"the relay of {self.name}", lambda: os.path.exists(f"/sys/class/net/{tap}"))
        call("ip", "link", "set", tap, "master", self.network.bridge, "up", "txqueuelen", "10000")

    def end(self) -> None:
        """The machine and what was started for it."""
        relay = remembered(self._relay_file)
        if relay is not None:
            relay.send(signal.SIGKILL)
            relay.wait(5)
        self.crash()

    @property
    def _pid_file(self) -> Path:
        return self.own / "pid"

    @property
    def _relay_file(self) -> Path:
        return self.own / "relay.pid"

    def _holder(self) -> Identity | None:
        return remembered(self._pid_file)

    def _remember(self, argv: Sequence[str], file: Path) -> None:
        file.write_text(str(spawn(argv, self.log)))

    def _wire(self) -> None:
        if not os.path.exists(f"/run/netns/{self._namespace}"):
            call("ip", "netns", "add", self._namespace)
        if os.path.exists(f"/sys/class/net/{self._cable}"):
            self.link(True)
            return
        call("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        call("ip", "link", "set", self._cable, "master", self.network.bridge, "up")
        batch = [
            f"addr add {self.address}/24 dev eth0",
            f"addr add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up",
            "link set lo up",
        ]
        call("ip", "-n", self._namespace, "-batch", "-", text="\n".join(batch))


def hosts_file(machines: Sequence[Machine], others: Mapping[str, str]) -> str:
    """The text of /etc/hosts. Mapped addresses too: torch's rendezvous looks those up, and logs an error each time."""
    named = {"127.0.0.1": "localhost", "::1": "localhost", **others}
    lines = [f"{address} {name}" for address, name in named.items()]
    for machine in machines:
        lines += [f"{machine.address} {machine.name}", f"::ffff:{machine.address} {machine.name}"]
    return "\n".join(lines) + "\n"


def answers(address: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        with socket.create_connection((address, port), timeout=0.5):
            return True
    except OSError:
        return False


def remembered(file: Path) -> Identity | None:
    """The process whose identity stands in the file; it may have ended."""
    try:
        return Identity.parse(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
