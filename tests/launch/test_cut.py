"""Machines that are cut off without a word: the others end their ranks, and hear what they are told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel.launch import rendezvous
from accel.launch.errors import RendezvousFailed
from accel.launch.incarnation import Incarnation
from accel.launch.peers import StoreSilent, StoreWithTimeout
from tests.clusters.fixtures import _hosts
from tests.clusters.ssh import SshHosts
from tests.ports import free_port

from .conftest import DEADLINE_S, ROOT, until

PROGRAM = "trap 'echo told to end; exit 3' TERM; echo here; while :; do sleep 0.1; done"
Start = Callable[..., list["subprocess.Popen[bytes]"]]


__all__ = ["_hosts"]


@pytest.fixture
def two_hosts(_hosts: SshHosts) -> SshHosts:
    """The run's hosts, of which the tests use two."""
    return _hosts


@pytest.fixture
def start(two_hosts: SshHosts, tmp_path: Path) -> Iterator[Start]:
    """Starts a gang of one rank on each host; returns its launchers when both ranks run."""
    launchers: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> list[subprocess.Popen[bytes]]:
        program = tmp_path / "program.sh"
        program.write_text(f"#!/bin/sh\n{PROGRAM}\n")
        program.chmod(0o755)
        for rank, machine in enumerate(two_hosts.machines[:2]):
            command = [sys.executable, "-m", "accel", "launch", "--cpu", "--no_python", "--num_machines", "2"]
            command += ["--machine_rank", str(rank), "--main_process_ip", two_hosts["node1"].address]
            command += ["--num_processes", "2", "--log_dir", str(tmp_path / f"node{rank}"), *flags, str(program)]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            noted = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(tmp_path / f"pid{rank}"), *command]
            launchers.append(subprocess.Popen(machine.argv(*noted), cwd=tmp_path, env=env))
        for rank in range(2):
            until(f"rank {rank} runs", lambda rank=rank: "here" in printed(tmp_path, rank))  # type: ignore[misc]
        return launchers

    yield start
    two_hosts.heal()
    for machine in two_hosts.machines:
        machine.kill()
    for launcher in launchers:
        launcher.wait(DEADLINE_S)
    two_hosts.heal()


def tell_to_end(hosts: SshHosts, rank: int, folder: Path) -> None:
    """By its number there: the process that is known here only waits for it."""
    hosts.machines[rank].run("kill", "-TERM", (folder / f"pid{rank}").read_text().strip())


def printed(folder: Path, rank: int) -> str:
    log = folder / f"node{rank}" / f"rank-{rank}.a0.log"
    return log.read_text() if log.exists() else ""


def test_a_lost_node_0_does_not_make_the_others_deaf(start: Start, two_hosts: SshHosts, tmp_path: Path) -> None:
    launchers = start("--shutdown_timeout", "600", "--rdzv_conf", "lost_after=600")
    two_hosts["node1"].link(False)
    tell_to_end(two_hosts, 1, tmp_path)
    assert launchers[1].wait(DEADLINE_S) != 0
    assert "told to end" in printed(tmp_path, 1)


def test_the_others_notice_that_node_0_is_lost(start: Start, two_hosts: SshHosts, tmp_path: Path) -> None:
    launchers = start("--shutdown_timeout", "600", "--rdzv_conf", "lost_after=6")
    two_hosts["node1"].link(False)
    assert launchers[1].wait(DEADLINE_S) != 0
    assert "told to end" in printed(tmp_path, 1)
    assert "node 0 is gone: its store has not responded for" in (tmp_path / "node1/launch.jsonl").read_text()


def test_node_0_need_not_stay_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 3600.0)
    port = free_port()
    nodes = [
        rendezvous.GangRendezvous(
            address="127.0.0.1", port=port, node_rank=rank, nodes=2, run_id="x", stay_s=0, ending=lambda: True
        )
        for rank in range(2)
    ]
    meeting = [threading.Thread(target=node.next_rendezvous, daemon=True) for node in nodes]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join(DEADLINE_S)
    leaving = threading.Thread(target=nodes[0].leave, daemon=True)
    leaving.start()
    leaving.join(DEADLINE_S)
    assert not leaving.is_alive()


def _node(port: int, rank: int) -> rendezvous.GangRendezvous:
    return rendezvous.GangRendezvous(
        address="127.0.0.1", port=port, node_rank=rank, nodes=2, run_id="x",
        incarnation=Incarnation(pod="a", starts=rank),
    )  # fmt: skip


def test_who_waits_for_a_node_hears_that_it_has_failed() -> None:
    port = free_port()
    first, second = (_node(port, rank) for rank in range(2))
    failed: list[BaseException] = []

    def meet() -> None:
        try:
            first.next_rendezvous()
        except RendezvousFailed as error:
            failed.append(error)

    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    second.attempt = 0
    second._open(time.monotonic() + DEADLINE_S)
    second.announce_failure({"node": 1, "host": "b", "how": "was started again"})
    meeting.join(DEADLINE_S)
    assert [str(error) for error in failed] == ["node 1 (b) was started again"]


def test_a_rank_is_taken_over_by_one_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        """A store in which another node is always faster."""

        def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
            return Incarnation(pod="a", starts=0 if not expected else 9).encode().encode()

        def check(self, keys: list[str]) -> bool:
            return False

    node = _node(1, 0)
    node._incarnation = Incarnation(pod="a", starts=1)
    monkeypatch.setattr(node, "_store", Lost)
    assert not node._join(time.monotonic())


def test_a_silent_store_is_asked_no_more() -> None:
    ending, never, asked = threading.Event(), threading.Event(), []
    patience = StoreWithTimeout(3600, ending.is_set)
    assert patience.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        patience.call(lambda: 1 // 0)
    ending.set()
    with pytest.raises(StoreSilent):
        patience.call(never.wait)
    with pytest.raises(StoreSilent):
        patience.call(lambda: asked.append(1))
    assert not asked
    never.set()
