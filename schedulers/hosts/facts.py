"""What a host said about itself, and what a job wants of it. Data only."""

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
    """How many GPUs, who counted them (nvml, nvidia-smi, driver, kfd; '' for nobody), and what is wrong with them."""

    count: int
    how: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What `accel launch` would use there: the kind of devices, what names each, and how many processors."""

    kind: str = "cpu"
    ids: tuple[str, ...] = ()
    cpus: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The host's queue: the names of the slots that jobs hold, and how many jobs wait."""

    held: tuple[str, ...] = ()
    waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What `node/probe.py` found. Sizes are in bytes; limits are -1 when there is none.

    machine:  the same text for two names of one machine.
    packages: a package's name -> its version in the Python that was asked, None when it is not there.
    disk:     the nearest directory that exists of the one that will be written to.
    time:     the host's clock, in seconds since the epoch.
    queue:    as it was when the host was asked.
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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A host's facts, and between which two moments of our own clock it stated its time."""

    facts: Facts
    asked_at: float
    answered_at: float

    @property
    def skew_s(self) -> float:
        """How far the host's clock is ahead (or, negative, behind): the least that fits, the way there taken out.

        The host read its clock after it was asked and before its answer came. A time between the two is no skew.
        """
        ahead, behind = self.facts.time - self.answered_at, self.asked_at - self.facts.time
        return max(ahead, 0.0) if ahead > behind else -max(behind, 0.0)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a job needs of every host.

    packages:  a package's name -> the module by which it is found where it was not installed as a package.
    interface: the network interface (a name or its beginning) whose address node 0 should have.
    ports:     of which the first one that is free on node 0 is taken; 0 is any.
    leads:     of so many hosts, node 0 first, the others must be able to reach an address: those after it may lead;
               0: each host runs jobs of its own, and needs to reach no other.
    """

    gpus: int = 0
    disk_bytes: int = GB
    python: tuple[int, int] = (3, 10)
    packages: Mapping[str, str] = field(default_factory=lambda: {"accel-launch": "accel", "torch": "torch"})
    interface: str | None = None
    ports: tuple[int, ...] = (0,)
    leads: int = 4
