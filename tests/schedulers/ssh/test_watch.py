"""Being told of a job's end by its hosts, instead of asking again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers.ssh.target import SshOptions, SshTarget
from schedulers.target import SupportsWait, TargetContext
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import host_options
from .test_status import ALL, ENDED, JOB, RUNNING, put, supervised

__all__ = ["supervised"]

LONG_S = 60.0


@pytest.fixture
def target(ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[SshTarget]:
    options = SshOptions(hosts="node[1-3]", **host_options(ssh_hosts))
    made = SshTarget(TargetContext(name="lab", options=options, jobs=tmp_path))
    assert isinstance(made, SupportsWait)
    yield made
    made.close()


class Waiting(threading.Thread):
    """Waits as a waiter does: again and again for a short time, until there is news."""

    def __init__(self, target: SshTarget, native_id: str) -> None:
        super().__init__(daemon=True)
        self.told = False
        self._ssh = target
        self._job = native_id
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + LONG_S
        while not self.told and time.monotonic() < deadline:
            self.told = bool(self._ssh.wait(self._job, 0.2))

    def is_told(self) -> bool:
        self.join(LONG_S)
        return self.told


def watchers(hosts: SshHosts, node: str) -> int:
    """How many conversations stay open on a host."""
    return hosts[node].run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'").count("sys.stdin.buffer.read(")


def test_news_and_none(target: SshTarget, ssh_hosts: SshHosts, supervised: object) -> None:
    for node in ("node1", "node2"):
        supervised(put(ssh_hosts, node, state=RUNNING))  # type: ignore[operator]
    assert target.wait(ALL, 0.3) is False
    waiting = Waiting(target, ALL)
    put(ssh_hosts, "node1", exit=ENDED)
    assert waiting.is_told()


def test_one_conversation_for_all_jobs_on_a_host(target: SshTarget, ssh_hosts: SshHosts, supervised: object) -> None:
    for node in ("node1", "node2"):
        supervised(put(ssh_hosts, node, state=RUNNING))  # type: ignore[operator]
    waiting = Waiting(target, ALL)
    until(lambda: watchers(ssh_hosts, "node1") == 1, "node1 is watched")
    others = [Waiting(target, f"node1/{JOB}{number}") for number in range(3)]  # which node1 does not know: news
    assert all(other.is_told() for other in others)
    assert watchers(ssh_hosts, "node1") == 1
    assert not waiting.told
    put(ssh_hosts, "node1", exit=ENDED)
    assert waiting.is_told()
    target.close()
    until(lambda: watchers(ssh_hosts, "node1") == 0, "nothing stays behind on the host")


def test_another_host_is_asked_when_this_one_goes_away(
    target: SshTarget, ssh_hosts: SshHosts, supervised: object
) -> None:
    for node in ("node1", "node2"):
        supervised(put(ssh_hosts, node, state=RUNNING))  # type: ignore[operator]
    supervised(put(ssh_hosts, "node3", state=RUNNING))  # type: ignore[operator]
    waiting = Waiting(target, ALL)
    until(lambda: watchers(ssh_hosts, "node1") == watchers(ssh_hosts, "node2") == 1, "two are watched")
    assert watchers(ssh_hosts, "node3") == 0
    ssh_hosts.end_sessions("node1")
    until(lambda: watchers(ssh_hosts, "node3") == 1, "node3 is watched")
    assert not waiting.told
    put(ssh_hosts, "node3", exit=ENDED)
    assert waiting.is_told()


def test_another_host_is_asked_after_one_whose_supervisor_is_gone(
    target: SshTarget, ssh_hosts: SshHosts, supervised: object
) -> None:
    put(ssh_hosts, "node1", state=RUNNING)  # nobody holds its lock
    for node in ("node2", "node3"):
        supervised(put(ssh_hosts, node, state=RUNNING))  # type: ignore[operator]
    assert Waiting(target, ALL).is_told()
    assert target.wait(ALL, 0.3) is False
    until(lambda: watchers(ssh_hosts, "node3") == 1, "node3 is watched")


def test_hosts_that_cannot_be_reached_hold_nobody_up(target: SshTarget, ssh_hosts: SshHosts) -> None:
    for node in ("node1", "node2", "node3"):
        ssh_hosts[node].crash()
    assert [target.wait(ALL, 0.05) for _ in range(3)] == [False] * 3
