"""The virtual machines of TPU slices: hosts of tests/clusters/ssh.py, given out, powered on and off, and given back.

A host that is given out a second time is another machine of the same address: empty homes and another host key.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .netns import call
from .ssh import SshHosts

__all__ = ["METADATA_ADDRESS", "SliceHosts", "UnknownAccelerator", "accelerator", "hosts_of", "listen_inside"]

METADATA_ADDRESS = "169.254.169.254"
_CLONE_NEWNET = 0x40000000
_CHIPS_PER_HOST = 4
# https://docs.cloud.google.com/tpu/docs/supported-tpu-configurations: of these, a type's number counts chips; of all
# others TensorCores, two a chip.
_BY_CHIPS = ("v5litepod", "v6e")
_MOST_CHIPS_OF_ONE_HOST = {"v5litepod": 8, "v6e": 8}
_GENERATIONS = {"V2": "v2", "V3": "v3", "V4": "v4", "V5LITE_POD": "v5litepod", "V5P": "v5p", "V6E": "v6e"}


class UnknownAccelerator(Exception):
    """There is no such accelerator type, or no slice of this shape."""


def accelerator(accelerator_type: str, generation: str, topology: str) -> tuple[str, str]:
    """The generation and the accelerator type of a slice that is named by its type, or by generation and topology."""
    if accelerator_type:
        return accelerator_type.partition("-")[0], accelerator_type
    if generation not in _GENERATIONS or not re.fullmatch(r"\d+(x\d+){1,2}", topology):
        raise UnknownAccelerator(f"{generation} {topology}")
    name = _GENERATIONS[generation]
    chips = math.prod(map(int, topology.split("x")))
    return name, f"{name}-{chips if name in _BY_CHIPS else 2 * chips}"


def hosts_of(accelerator_type: str) -> int:
    """The number of virtual machines of a slice. Raises UnknownAccelerator."""
    name, _, number = accelerator_type.partition("-")
    if name not in _GENERATIONS.values() or not number.isdecimal():
        raise UnknownAccelerator(accelerator_type)
    chips = int(number) if name in _BY_CHIPS else int(number) / 2
    if chips < 1 or not math.log2(chips).is_integer():
        raise UnknownAccelerator(accelerator_type)
    if chips <= _MOST_CHIPS_OF_ONE_HOST.get(name, _CHIPS_PER_HOST):
        return 1
    return int(chips) // _CHIPS_PER_HOST


def topology(accelerator_type: str) -> str:
    """The chips along each side of a slice, as `tpu-env` of the metadata has it. Raises UnknownAccelerator."""
    name, _, number = accelerator_type.partition("-")
    hosts_of(accelerator_type)
    doublings = int(math.log2(int(number) if name in _BY_CHIPS else int(number) // 2))
    sides = 2 if name in _BY_CHIPS else 3
    shares = [(doublings + side) // sides for side in range(sides)]
    return "x".join(str(2**share) for share in (sorted(shares, reverse=True) if doublings < sides else shares))


class SliceHosts:
    """The hosts of a zone, which belong to one slice at a time."""

    def __init__(self, hosts: SshHosts) -> None:
        self._hosts = hosts
        self._free = list(hosts.names)
        self._used: set[str] = set()
        self._lock = threading.Lock()
        self._scripts: list[subprocess.Popen[bytes]] = []

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[str] | None:
        """Names of free hosts; None where so many are not to be had."""
        with self._lock:
            if count > len(self._free):
                return None
            names, self._free = self._free[:count], self._free[count:]
            return names

    def boot(self, names: Sequence[str], metadata: Mapping[str, str]) -> None:
        """Power on new machines, which accept the keys of the node's metadata and run its startup script."""
        with self._lock:
            used = self._used.intersection(names)
            self._hosts.renew(*sorted(used))
            self._used.update(names)
        self.authorize(names, metadata.get("ssh-keys", ""))
        for name in names:
            self._run_script(name, metadata.get("startup-script", ""))

    def _run_script(self, name: str, text: str) -> None:
        """As root, with what it prints in `startup-script.log` of the host's own directory."""
        host = self._hosts[name]
        script = host.own / "startup-script"
        script.write_text(text)
        script.chmod(0o700)
        if text:
            with (host.own / "startup-script.log").open("ab") as log:
                argv = host.argv(str(script))
                self._scripts = [process for process in self._scripts if process.poll() is None]
                self._scripts.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def start(self, names: Sequence[str]) -> None:
        """Power on the machines that were stopped, with the disks that they had."""
        for name in names:
            self._hosts.reboot(name)
            self._run_script(name, (self._hosts[name].own / "startup-script").read_text())

    def stop(self, names: Sequence[str]) -> None:
        """Power off: no process is told."""
        for name in names:
            self._hosts[name].kill()

    def free(self, names: Sequence[str]) -> None:
        """Power off for good: the hosts are the next slice's."""
        self.stop(names)
        with self._lock:
            self._free = sorted({*self._free, *names}, key=self._hosts.names.index)

    def authorize(self, names: Sequence[str], keys: str) -> None:
        """Accept the keys of `ssh-keys`, a line `USER:KEY` each, as the guest agent does; no others of these users."""
        by_user: dict[str, list[str]] = {}
        for line in keys.splitlines():
            user, colon, key = line.strip().partition(":")
            if colon:
                by_user.setdefault(user, []).append(key)
        for name in names:
            self._hosts.authorize(name, {user: "".join(f"{key}\n" for key in lines) for user, lines in by_user.items()})

    def address(self, name: str) -> str:
        return self._hosts[name].address

    def guest_attributes(self, name: str) -> Mapping[str, str]:
        """What its guest agent has published: the host key by its type, and the name of the instance."""
        kind, key = (self._hosts[name].own / "host_key.pub").read_text().split()[:2]
        return {kind: key, "hostname": name}

    def listen(self, name: str, address: str, port: int) -> socket.socket:
        """A socket of this process that listens on the host."""
        network = self._hosts.network
        if address == METADATA_ADDRESS:
            call("ip", "-n", f"{network.slot.tag}-{name}", "addr", "replace", f"{address}/32", "dev", "lo")
        return listen_inside(f"{network.slot.tag}-{name}", address, port)


def listen_inside(namespace: str, address: str, port: int) -> socket.socket:
    """A listening socket in another network namespace. A thread of its own enters that, and ends."""
    outcome: dict[str, Any] = {}

    def listen() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            with open(f"/run/netns/{namespace}") as file:
                if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
            outcome["socket"] = socket.create_server((address, port))
        except OSError as error:
            outcome["error"] = error

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    made: socket.socket = outcome["socket"]
    return made
