"""What a submit reports when a host is lost while the supervisors are started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from schedulers.errors import SchedulerError, Unreachable
from schedulers.hosts.errors import HostUnreachable, RemoteError
from schedulers.hosts.facts import Facts, Gpus
from schedulers.hosts.host_list import Host
from schedulers.hosts.transport import Outcome
from schedulers.ssh.options import SshOptions
from schedulers.ssh.placement import Node, Placement
from schedulers.ssh.status import Hosts
from schedulers.ssh.submit import NotStarted, start

FACTS = Facts(
    name="h", machine="m", user="me", home="/home/me", python="3.12.0", executable="/usr/bin/python3", packages={},
    disk="/", disk_free=1, disk_writable=True, shm_free=1, processes=-1, files=-1, gpus=Gpus(count=0, how=""),
    addresses=(), time=0.0,
)  # fmt: skip
LOST, REFUSED = HostUnreachable("b", "connection lost"), RemoteError("b", "port 2 cannot be had")


class Answers:
    """Hosts of which some fail to start anything, and who is told to cancel."""

    root, python = "~/.accel", "python3"

    def __init__(self, errors: dict[str, SchedulerError]) -> None:
        self._errors = errors
        self.pool = self
        self.cancelled: list[str] = []

    def map(self, _: Callable[..., object], hosts: Iterable[Host]) -> list[Outcome[None]]:
        return [Outcome(host, error=self._errors.get(host.name)) for host in hosts]

    def ask(self, asked: dict[Host, list[dict[str, Any]]]) -> None:
        for host, steps in asked.items():
            self.cancelled += [f"{step['op']} {step['job']} on {host}" for step in steps]


def job(job_id: str, *names: str) -> Placement:
    nodes = tuple(Node(host=Host(name=name), facts=FACTS, address=name, port=1) for name in names)
    return Placement(job_id=job_id, members=nodes, spares=(), master_port=None, claim="c")


@pytest.mark.parametrize(
    ("jobs", "error", "raised", "cancelled"),
    [
        ([job("one", "a"), job("two", "b")], LOST, Unreachable, []),  # it may run there
        ([job("one", "a", "b")], LOST, NotStarted, ["cancel one on a"]),  # none runs before all are there
        ([job("one", "a"), job("two", "b")], REFUSED, NotStarted, ["cancel one on a", "cancel two on b"]),
    ],
)
def test_a_host_that_fails(
    jobs: list[Placement], error: SchedulerError, raised: type[SchedulerError], cancelled: list[str]
) -> None:
    hosts = Answers({"b": error})
    with pytest.raises(raised, match=str(error)):
        start(cast(Hosts, hosts), SshOptions(), jobs, secrets={})
    assert hosts.cancelled == cancelled


def test_all_that_start() -> None:
    start(cast(Hosts, Answers({})), SshOptions(), [job("one", "a", "b")], secrets={})
