"""Data types of the facts that a host reports, and of a job's requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

GB = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Address:
    """An address of a network interface. `speed` is in Mbit/s, 0 when the interface does not say."""

    interface: str
    address: str
    speed: int = 0
    virtual: bool = False


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """A host's GPUs: their number, who counted them (nvml, nvidia-smi, driver, kfd; '' for nobody), and a problem."""

    count: int
    how: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that `accel launch` would use there: kind, ids, the number of processors, and its probe's problem."""

    kind: str = "cpu"
    ids: tuple[str, ...] = ()
    cpus: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The host's queue: the names of the slots that jobs hold, and how many jobs wait."""

    held: tuple[str, ...] = ()
    waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that `node/probe.py` reports. Sizes are in bytes; limits are -1 if there is none.

    machine:  the same text for two names of one machine.
    packages: a package's name -> its version in the probed Python, None if it is missing.
    disk:     the directory that will be written to, or its nearest existing parent.
    time:     the host's clock, in seconds since the epoch.
    queue:    as it was when the host was probed.
    """

    name: str
    machine: str
    user: str
    home: str
    python: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+")]
    executable: str
    packages: Mapping[str, str | None]
    disk: str
    disk_free: int
    disk_writable: bool
    shm_free: int
    processes: int
    files: int
    gpus: Gpus
    addresses: tuple[Address, ...]
    time: float
    devices: Devices = Devices()
    queue: Queue = Queue()

    def interface_of(self, address: str | None) -> str | None:
        return next((entry.interface for entry in self.addresses if entry.address == address), None)


@dataclass(frozen=True, kw_only=True)
class TimedFacts:
    """A host's facts, with our own clock's times of the request and of the reply."""

    facts: Facts
    requested_at: float
    replied_at: float

    @property
    def skew_s(self) -> float:
        """The seconds that the host's clock is ahead (negative: behind), at least; the round trip is subtracted.

        The host read its clock after the request and before the reply. A time between the two is no skew.
        """
        ahead, behind = self.facts.time - self.replied_at, self.requested_at - self.facts.time
        return max(ahead, 0.0) if ahead > behind else -max(behind, 0.0)


@dataclass(frozen=True, kw_only=True)
class HostRequirements:
    """A job's requirements of every host.

    packages:  a package's name -> the module to look for if it was not installed as a package.
    interface: the network interface (a name or its beginning) whose address node 0 should have.
    ports:     node 0 uses the first one that is free; 0 is any.
    leads:     the number of hosts, node 0 first, that may lead: the others must be able to reach them;
               0: each host runs jobs of its own, and needs to reach no other.
    """

    gpus: int = 0
    disk_bytes: int = GB
    python: tuple[int, int] = (3, 10)
    packages: Mapping[str, str] = field(default_factory=lambda: {"accel-launch": "accel", "torch": "torch"})
    interface: str | None = None
    ports: tuple[int, ...] = (0,)
    leads: int = 4
