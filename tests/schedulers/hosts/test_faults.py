"""Supervisors under what hosts do to them: clocks that jump, disks that fill, signals, children left behind, crowds."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedulers.hosts.bundle import PROGRAM, program
from schedulers.hosts.supervisor import wire
from schedulers.hosts.supervisor.documents import AtomicJsonFile
from schedulers.hosts.transport import Pool
from schedulers.node.listen import listen
from tests.clusters.ssh import SshHosts
from tests.marks import long
from tests.ports import free_port

from .supervised import HEARTBEAT_S, Job, queue, shell, start_command

Make = Callable[..., Job]
FOREVER = shell("sleep 1000 & wait")
CROWD = 64
# Every time the wall clock is asked, it is another day.
# Supervisors of one job on one computer have an id each (see below), and still are of one job for each other.
ONE_JOB = (
    "import os,sys;sys.path.insert(0,os.path.join(sys.argv[1],'supervisor.pyz'));"
    "from schedulers.hosts.supervisor.wire import Party;"
    "made=Party.__init__;Party.__init__=lambda self,job,token,own:made(self,'crowd',token,own);"
)
JUMPS = "import time;t=time.time;n=iter(range(1,10**9));time.time=lambda:t()+86400*next(n)*(-1)**next(n);"


@pytest.fixture
def make(ssh_hosts: SshHosts, pool: Pool) -> Make:
    def made(command: list[str], **settings: Any) -> Job:
        return Job(ssh_hosts, pool, command, **settings)

    return made


def test_a_wall_clock_that_jumps_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def jumping(python: str, directory: str, node: int) -> list[str]:
        argv = start_command(python, directory, node)
        return [*argv[:3], JUMPS + argv[3], *argv[4:]]

    monkeypatch.setattr("tests.schedulers.hosts.supervised.start_command", jumping)
    job = make(shell("while [ ! -e $HOME/enough ]; do sleep 0.1; done"), nodes=3, time_limit_s=120).start()
    job.await_phase("running")
    began = time.monotonic()
    job.until("longer than a heartbeat", lambda: time.monotonic() - began > HEARTBEAT_S + 2)
    assert {job.state(name)["phase"] for name in job.names} == {"running"}
    for name in job.names:
        (job.hosts.home(name) / "enough").touch()
    assert {result["state"] for result in job.exits()} == {"succeeded"}


@pytest.mark.parametrize("node", ["node1", *long("node2")])
def test_a_supervisor_that_is_told_to_end_ends_its_ranks(make: Make, node: str) -> None:
    """As a host does to everything when it is shut down in order."""
    job = make(shell("setsid sleep 1000 & sleep 1000"), nodes=3).start()
    job.await_phase("running")
    job.hosts[node].run("kill", "-TERM", str(job.state(node)["pid"]))
    (own,) = job.exits(node)
    assert (own["state"], own["fenced"]) == ("failed", True)
    assert own["message"] == f"{node}: the supervisor received SIGTERM"
    for result in job.exits(*[name for name in job.names if name != node]):
        assert result["message"].startswith(f"{node} was silent")


def test_what_the_job_leaves_behind_is_collected_when_it_ends(make: Make) -> None:
    """A process whose parent has gone belongs to the supervisor, for as long as the job runs."""
    job = make(shell("for i in 1 2 3 4 5; do (sh -c 'sleep 0.1' &); done; sleep 1000"), nodes=1).start()
    job.await_phase("running")
    count = "ps -o stat= --ppid {} | grep -c ."
    supervisor = job.state("node1")["pid"]

    def children() -> int:
        return int(job.hosts["node1"].run("sh", "-c", f"{count.format(supervisor)}; :"))

    job.until("only the launcher is left", lambda: children() == 1)
    (job.directory("node1") / "cancel").touch()
    job.exits()


def test_ranks_have_the_limits_and_signals_of_the_session(make: Make) -> None:
    job = make(shell("ulimit -Sn; umask; grep SigIgn /proc/self/status"), nodes=1)
    ignored = job.hosts["node1"].run("grep", "SigIgn", "/proc/self/status")
    session = job.pool.remote("node1").run(["sh", "-c", "ulimit -Sn; umask"]).stdout.decode()
    job.start().exits()
    assert job.log("node1", "node-0.log") == session + ignored


def test_a_spare_whose_setup_was_cut_short_begins_it_again(make: Make) -> None:
    """The spare is still at it when the gang must start again; then it has all the time it needs."""
    slow = "[ $(hostname) != node3 ] || { echo begun >>~/setups; [ -e ~/enough ] || sleep 1000; }"
    job = make(
        shell("echo $rank; [ $ACCEL_ATTEMPT = 1 ] || sleep 1000"), spares=1, max_restarts=1, setup=[["sh", "-c", slow]]
    ).start()
    job.await_phase("running", "node1", "node2")
    job.until("the spare is at its setup", (job.hosts.home("node3") / "setups").exists)
    (job.hosts.home("node3") / "enough").touch()
    job.hosts["node2"].kill()
    for result in job.exits("node1", "node3"):
        assert (result["state"], result["attempt"]) == ("succeeded", 1), job.told()
    assert (job.hosts.home("node3") / "setups").read_text() == "begun\nbegun\n"


@pytest.mark.parametrize("node", ["node1", *long("node2")])
def test_how_a_job_ended_is_written_on_a_full_disk(make: Make, node: str) -> None:
    top = f"{make(FOREVER).hosts.box}/home/root/.accel"
    job = make(shell(f"[ $(hostname) = {node} ] && cat /dev/zero >~/.accel/fill; touch ~/full; sleep 1000"))
    job.hosts.small_disk(node, top, 2)
    job.start()
    job.until("the disk is full", (job.hosts.home(node) / "full").exists)
    other = "node2" if node == "node1" else "node1"
    (job.directory(other) / "cancel").touch()
    (result,) = job.exits(other)
    assert (result["state"], result["reason"]) == ("cancelled", "user"), job.told()
    machine = job.hosts[node]
    job.until(
        "it has its result",
        lambda: machine.run("sh", "-c", f"cat {top}/jobs/{job.id}/exit.json 2>&1; :").startswith("{"),
    )
    own = json.loads(machine.run("cat", f"{top}/jobs/{job.id}/exit.json"))
    assert {**own, "node": 0, "observed_at": 0} == {**result, "node": 0, "observed_at": 0}


def test_a_document_that_is_read_while_it_is_written_is_whole(tmp_path: Path) -> None:
    document = AtomicJsonFile(str(tmp_path / "state.json"), 256)
    assert not (tmp_path / "state.json").exists()
    for size in (10, 200, 3, 5000, 7):
        document.write({"text": "x" * size})
        assert json.loads((tmp_path / "state.json").read_text()) == {"text": "x" * size}
    result = AtomicJsonFile(str(tmp_path / "exit.json"), 256)
    result.write_once({"first": True})
    AtomicJsonFile(str(tmp_path / "exit.json"), 256).write_once({"first": False})
    assert (tmp_path / "exit.json").read_text() == '{"first": true}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit.json", "state.json", "state.json.next"]


def test_the_ranks_port_is_of_the_range_or_there_is_none() -> None:
    taken, free = free_port(), free_port()
    with listen(taken):
        assert wire.free_port(free, taken, taken) == free
        assert wire.free_port(taken, free, free) == wire.free_port(None, free, free) == free
        assert wire.free_port(taken, taken, taken) == 0


def test_one_leader_has_time_for_a_crowd(tmp_path: Path) -> None:
    """All on this computer: from the last one that starts until all ranks run."""
    ports = [free_port() for _ in range(CROWD)]
    hosts = [
        {"name": f"h{i}", "address": "127.0.0.1", "control_port": port, "interface": None}
        for i, port in enumerate(ports)
    ]
    count = 'echo "{\\"event\\": \\"attempt\\", \\"attempt\\": 0}" >>"${10}/launch.jsonl"; touch started'
    crowd = f"crowd-{secrets.token_hex(4)}"  # an id each: on one computer each would end the others' processes too
    common = {
        "schema": 1, "token": secrets.token_hex(32), "nodes": hosts,
        "spares": [], "procs_per_node": None, "command": ["/bin/sh", "-c", count, "launch"], "workdir": ".", "env": {},
        "setup": [], "grace_s": 2.0, "time_limit_s": None, "heartbeat_s": 30.0, "start_timeout_s": 120.0,
        "max_restarts": 0, "master_port": 20000, "ports": [20000, 32767], "secrets": [],
        "queue": queue(concurrency=CROWD),
    }  # fmt: skip
    places = []
    for index in range(CROWD):
        place = tmp_path / "jobs" / str(index)
        place.mkdir(parents=True)
        (place / "settings.json").write_text(json.dumps({**common, "node": index, "job_id": f"{crowd}-{index}"}))
        (place / PROGRAM).write_bytes(program())
        places.append(place)
    began = time.monotonic()
    starts = []
    for index, place in enumerate(places):
        argv = start_command(sys.executable, str(place), index)
        starts.append(subprocess.Popen([*argv[:3], ONE_JOB + argv[3], *argv[4:]], stdin=subprocess.DEVNULL))
    assert [start.wait(120) for start in starts] == [0] * CROWD
    up = time.monotonic()
    _until(lambda: all((place / "started").exists() for place in places))
    went = time.monotonic()
    print(f"{CROWD} supervisors: up in {up - began:.2f} s, all ranks begun {went - up:.2f} s later")
    _until(lambda: all((place / "exit.json").exists() for place in places))
    results = [json.loads((place / "exit.json").read_text()) for place in places]
    assert {(result["state"], result["message"]) for result in results} == {("succeeded", "")}


def _until(so: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
