"""Supervisors on real hosts, without a client: how jobs end when all goes well, and when it does not."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from schedulers.hosts.errors import RemoteError
from schedulers.hosts.jobs.cleanup import clear
from schedulers.hosts.jobs.status import Hosts
from schedulers.hosts.transport import Pool
from schedulers.job import Reason, State, Status
from schedulers.ssh.target import SshOptions
from tests.clusters.ssh import SshHosts
from tests.marks import long

from .supervised import ACCEL, HEARTBEAT_S, Job, shell, start_command

Make = Callable[..., Job]
FOREVER = shell("sleep 1000 & echo pid $$; wait")
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "attempt", os.environ["ACCEL_ATTEMPT"], flush=True)
rank, _, attempt = os.environ.get("FAIL_ON", ".").partition(".")
if attempt == os.environ["ACCEL_ATTEMPT"]:
    if rank == str(dist.get_rank()):
        raise ValueError("no luck")
    __import__("time").sleep(1000)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def make(ssh_hosts: SshHosts, pool: Pool) -> Make:
    def made(command: list[str], **settings: Any) -> Job:
        return Job(ssh_hosts, pool, command, **settings)

    return made


def _python(code: str, *flags: str) -> list[str]:
    return [*ACCEL, "--cpu", *flags, "--no_python", "--", sys.executable, "-c", code]


def test_two_hosts_train_together_and_end(make: Make) -> None:
    job = make(_python(ALL_REDUCE), procs_per_node=1).start()
    for node, result in enumerate(job.exits(seconds=120)):
        status = Status.from_json(result)
        assert (status.state, status.reason, status.exit_code) == (State.SUCCEEDED, Reason.NONE, 0), job.told()
        assert (result["node"], result["fenced"], result["schema"]) == (node, False, 1)
        assert job.log(job.names[node], f"rank-{node}.a0.log") == "sum 3.0 of 2 attempt 0\n"


def test_a_rank_that_fails_is_named_and_the_gang_starts_again_while_it_may(make: Make) -> None:
    job = make(_python(ALL_REDUCE), procs_per_node=1, max_restarts=1)
    job.settings["env"]["FAIL_ON"] = "1.0"
    job.start()
    for result in job.exits(seconds=180):
        assert (result["state"], result["attempt"]) == ("succeeded", 1), job.told()
    assert "ValueError: no luck" in job.log("node2", "rank-1.a0.log")
    assert job.log("node1", "rank-0.a1.log") == "sum 3.0 of 2 attempt 1\n"


def test_the_first_failure_is_everybodys(make: Make, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    job = make([*ACCEL, "--cpu", "--", str(tmp_path / "train.py")], procs_per_node=1)
    job.settings["env"]["FAIL_ON"] = "1.0"
    for result in job.start().exits(seconds=120):
        assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "exit_code", 1)
        assert result["failure"]["rank"] == 1
        assert result["failure"]["host"] == "node2"
        assert "ValueError: no luck" in result["message"]


def test_a_launcher_that_cannot_be_run_is_a_failed_setup(make: Make) -> None:
    job = make(["/nowhere/accel", "launch"]).start()
    for result in job.exits():
        assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "setup", 127)
        assert "cannot run '/nowhere/accel'" in result["message"]


def test_setup_commands_run_once_a_host_before_any_rank(make: Make) -> None:
    setup = [["sh", "-c", "echo set up; echo x >> ~/setups"], ["sh", "-c", 'test "$ACCEL_JOB_ID"']]
    job = make(shell("cat ~/setups; [ $ACCEL_ATTEMPT = 1 ]"), setup=setup, max_restarts=1).start()
    for node, result in enumerate(job.exits()):
        assert (result["state"], result["attempt"]) == ("succeeded", 1)
        assert job.log(job.names[node], "setup.log") == "set up\n"
        assert job.log(job.names[node], f"node-{node}.log") == "x\nx\n"


def test_a_setup_command_that_fails_on_one_host_ends_the_job_on_all(make: Make) -> None:
    job = make(FOREVER, setup=[["sh", "-c", "[ $(hostname) = node1 ] || exit 7"]]).start()
    for result in job.exits():
        assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "setup", 7)
        assert result["message"] == "node2: the setup command 'sh' failed with exit code 7"
    assert not (job.directory("node1") / "logs/node-0.log").exists()


@pytest.mark.parametrize("asked_on", ["node2", *long("node1")])
def test_cancel_ends_everything_wherever_it_is_asked_for(make: Make, asked_on: str) -> None:
    job = make(shell("trap 'echo told; exit 0' TERM; setsid sleep 1000 & echo pid; wait"), nodes=3).start()
    for node, name in enumerate(job.names):  # it runs, and has set its trap
        job.until(f"{name} prints", partial(job.log, name, f"node-{node}.log"))
    (job.directory(asked_on) / "cancel").touch()
    for node, result in enumerate(job.exits()):
        assert (result["state"], result["reason"], result["message"]) == ("cancelled", "user", "cancelled")
        assert "told" in job.log(job.names[node], f"node-{node}.log")


def test_what_ignores_the_warning_is_killed_after_the_grace(make: Make) -> None:
    job = make(shell("trap '' TERM; while :; do sleep 0.1; done"), grace_s=0.2).start()
    job.await_phase("running")
    (job.directory("node1") / "cancel").touch()
    assert [result["state"] for result in job.exits()] == ["cancelled", "cancelled"]


def test_a_time_limit_is_kept(make: Make) -> None:
    job = make(FOREVER, time_limit_s=0.5, max_restarts=3).start()
    for result in job.exits():
        assert (result["state"], result["reason"]) == ("failed", "time_limit")
        assert result["message"] == "its time limit of 0.5 s was reached"


@pytest.mark.parametrize("absent", ["node1", *long("node3")])
def test_none_runs_when_one_host_never_comes(make: Make, absent: str) -> None:
    job = make(FOREVER, nodes=3, start_timeout_s=10.0)
    there = [name for name in job.names if name != absent]
    for result in job.start(*there).exits(*there):
        assert (result["state"], result["reason"]) == ("failed", "node_failure")
        assert result["message"] == f"{absent} did not connect within 10 s: the job did not start"
    assert not any(list((job.directory(name) / "logs").glob("node-*.log")) for name in there)


def test_a_job_that_waits_for_hosts_can_be_cancelled(make: Make) -> None:
    job = make(FOREVER, nodes=3).start("node2", "node3")
    (job.directory("node2") / "cancel").touch()
    (result,) = job.exits("node2")
    assert (result["state"], result["message"]) == ("cancelled", "cancelled before it started")
    (job.directory("node3") / "cancel").touch()
    job.exits("node3")


@pytest.mark.parametrize("victim", ["node2", "node1"])
@pytest.mark.parametrize("how", ["kill", *long("link")])
def test_a_host_that_is_lost_ends_the_job_and_is_named(make: Make, how: str, victim: str) -> None:
    job = make(FOREVER, nodes=3).start()
    job.await_phase("running")
    began = time.monotonic()
    if how == "kill":
        job.hosts[victim].kill()
    else:
        job.hosts[victim].link(False)
    others = [name for name in job.names if name != victim]
    for result in job.exits(*others):
        assert (result["state"], result["reason"], result["fenced"]) == ("failed", "node_failure", False)
        assert result["message"].startswith(f"{victim} was silent for ")
        assert float(result["message"].split()[4]) >= HEARTBEAT_S
    assert time.monotonic() - began >= HEARTBEAT_S - 1
    if how == "link":  # it has ended its ranks by itself, and does not speak for the job
        (fenced,) = job.exits(victim)
        assert (fenced["state"], fenced["reason"], fenced["fenced"]) == ("failed", "node_failure", True)


@pytest.mark.parametrize("victim", ["node1", *long("node2")])
def test_the_gang_starts_again_on_a_spare(make: Make, victim: str) -> None:
    job = make(shell("echo $rank $8; [ $ACCEL_ATTEMPT = 1 ] || sleep 1000"), spares=1, max_restarts=1)
    only = job.settings["master_port"] + 1
    job.settings["ports"] = [only, only]
    job.start().await_phase("running", "node1", "node2")
    job.hosts[victim].kill()
    for result in job.exits(*[name for name in job.names if name != victim]):
        assert (result["state"], result["attempt"], result["fenced"]) == ("succeeded", 1, False), job.told()
    assert job.log("node3", "node-2.log") == f"1 {only}\n"  # the last rank, and the port that the ranks meet at
    survivor = "node1" if victim == "node2" else "node2"
    assert job.log(survivor, f"node-{job.names.index(survivor)}.log").splitlines()[-1] == f"0 {only}"


def test_without_enough_hosts_there_is_no_other_attempt(make: Make) -> None:
    job = make(FOREVER, nodes=3, max_restarts=5).start()
    job.await_phase("running")
    job.hosts["node3"].kill()
    for result in job.exits("node1", "node2"):
        assert result["message"].endswith("; 2 hosts are left of the 3 that the job needs")
        assert result["attempt"] == 0


def test_two_halves_do_not_both_go_on(make: Make, tmp_path: Path) -> None:
    """Four hosts, two of them spares; the two that are cut off could run the job, as far as they know. On the disk that
    all share one of their ranks writes for as long as it can."""
    writes = f"trap '' TERM; while :; do echo >>{tmp_path}/written; sleep 0.05; done"
    looks = f"wc -l <{tmp_path}/written; sleep 0.5; wc -l <{tmp_path}/written"
    script = f"case $rank.$ACCEL_ATTEMPT in 1.0) {writes};; ?.1) {looks};; esac; sleep 1000"
    job = make(shell(script), spares=2, max_restarts=1, grace_s=60).start()
    job.await_phase("running", "node1", "node2")
    job.until("it writes", (tmp_path / "written").exists)
    with contextlib.ExitStack() as healing:
        for name, other in itertools.product(("node2", "node4"), ("node1", "node3")):
            route = ("blackhole", f"{job.hosts[other].address}/32")
            job.hosts[name].run("ip", "route", "add", *route)
            healing.callback(job.hosts[name].run, "ip", "route", "del", *route)
        job.await_phase("running", "node1", "node3", attempt=1)
        job.until("it has looked", lambda: job.log("node3", "node-2.log").count("\n") == 2)
        first, then = job.log("node3", "node-2.log").split()
        assert first == then
        for result in job.exits("node2", "node4"):
            assert (result["state"], result["fenced"]) == ("failed", True)
        (job.directory("node3") / "cancel").touch()
        for result in job.exits("node1", "node3"):
            assert (result["state"], result["attempt"], result["fenced"]) == ("cancelled", 1, False)


@pytest.mark.parametrize("victim", ["node1", *long("node2")])
def test_a_supervisor_that_is_killed_leaves_nothing_behind(make: Make, victim: str) -> None:
    job = make(shell("setsid sleep 1000 & sleep 1000"), nodes=3).start()
    job.await_phase("running")
    job.hosts[victim].run("kill", "-9", str(job.state(victim)["pid"]))
    for result in job.exits(*[name for name in job.names if name != victim]):
        assert (result["reason"], result["fenced"]) == ("node_failure", False)
        assert result["message"].startswith(f"{victim} was silent")
    # What has left the launcher's session outlives a shell, as this one; the supervisor's guard ends it.
    (result,) = job.exits(victim)
    assert (result["state"], result["fenced"]) == ("failed", True)
    assert f"the supervisor on {victim} was killed" in result["message"]


def test_real_ranks_end_with_the_supervisor_that_is_killed(make: Make) -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(1000)"
    job = make(_python(code), procs_per_node=1).start()
    job.until("it runs", lambda: any("sleep 1000" in line for line in job.processes("node2")))
    job.hosts["node2"].run("kill", "-9", str(job.state("node2")["pid"]))
    job.until("nothing is left", lambda: not job.processes("node2"))
    (result,) = job.exits("node1")
    assert (result["reason"], result["message"].split()[0]) == ("node_failure", "node2"), job.told()


def test_a_short_cut_is_no_harm(make: Make) -> None:
    job = make(shell("while [ ! -e $HOME/enough ]; do sleep 0.1; done"), heartbeat_s=20.0).start()
    job.await_phase("running")
    job.hosts["node2"].link(False)
    job.until("it is noticed", lambda: job.state("node1")["heard"]["1"] > 5)
    job.hosts["node2"].link(True)
    job.until("it is heard again", lambda: job.state("node1")["heard"]["1"] < 3)
    for name in job.names:
        (job.hosts.home(name) / "enough").touch()
    assert [result["state"] for result in job.exits()] == ["succeeded", "succeeded"]


def test_secrets_reach_the_ranks_and_nothing_else(make: Make) -> None:
    job = make(shell("[ ${#TOKEN} = 9 ] && sleep 1000")).start(secret={"TOKEN": "hush-hush"})
    job.await_phase("running")
    for name in job.names:
        assert not (job.directory(name) / "secrets.json").exists()
        assert "hush-hush" not in job.hosts[name].run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        supervisor = job.state(name)["pid"]
        assert "hush-hush" not in job.hosts[name].run("sh", "-c", f"tr '\\0' ' ' < /proc/{supervisor}/environ")
        left = job.hosts[name].run("sh", "-c", f"grep -rl hush-hush {job.directory(name)}; :")
        assert left.strip() == ""
        modes = {path.name: path.stat().st_mode & 0o077 for path in job.directory(name).rglob("*")}
        assert set(modes.values()) == {0}, modes
    (job.directory("node1") / "cancel").touch()
    job.exits()


@pytest.mark.parametrize("asked", ["status", "cancel", "clear"])
def test_who_asks_a_host_has_ended_what_a_killed_supervisor_and_its_guard_left(make: Make, asked: str) -> None:
    job = make(FOREVER, nodes=1, setup=[["sh", "-c", "setsid sleep 345 & sleep 346"]]).start()
    job.until("it is at its setup", lambda: sum("sleep 34" in line for line in job.processes("node1")) == 3)
    _kill_with_guard(job)
    job.until("they are dead", lambda: not any("supervisor.pyz" in line for line in job.processes("node1")))
    assert any("sleep 345" in line for line in job.processes("node1"))
    remote = job.pool.remote("node1")
    if asked == "clear":
        assert clear(remote, root="~/.accel", python="python3", unused_s=1e9, jobs=[job.id]) == {}
        assert job.processes("node1") == []
        assert not job.directory("node1").exists()
        return
    hosts = Hosts(SshOptions(ssh_config=str(job.hosts.config)))
    answer = hosts.query({remote.host: [{"op": asked, "job": job.id}]})[remote.host].get().done[0]
    hosts.close()
    assert answer is True or (answer["alive"], answer["exit"]) == (False, None)
    (result,) = job.exits("node1")
    assert (result["state"], result["fenced"]) == ("failed", True)
    assert "the supervisor on node1 was killed" in result["message"]


def _kill_with_guard(job: Job) -> None:
    supervisor = job.state("node1")["pid"]
    guard = job.hosts["node1"].run("ps", "-o", "ppid=", "-p", str(supervisor)).strip()
    job.hosts["node1"].run("kill", "-9", guard, str(supervisor))


def test_who_looks_for_a_supervisor_does_not_pass_for_one(make: Make) -> None:
    """`accel status` holds the lock for a moment, and that may be the moment in which a supervisor is started again."""
    job = make(FOREVER, nodes=1).start()
    job.await_phase("running")
    _kill_with_guard(job)
    with (job.directory("node1") / "supervisor.lock").open() as lock:
        job.until("it has died", partial(_shared, lock))
        threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        job.start_supervisor("node1")
        (result,) = job.exits("node1")
    assert "was killed" in result["message"]


def _shared(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def test_starting_twice_starts_once(make: Make) -> None:
    job = make(shell("echo once; while [ ! -e $HOME/enough ]; do sleep 0.1; done")).start()
    job.await_phase("running")
    pids = [job.state(name)["pid"] for name in job.names]
    for name in job.names:
        job.start_supervisor(name)
        (job.hosts.home(name) / "enough").touch()
    assert pids == [job.state(name)["pid"] for name in job.names]
    job.exits()
    job.start_supervisor("node1")
    assert job.log("node1", "node-0.log") == "once\n"


def test_what_hinders_a_supervisor_is_said_in_one_line(make: Make, pool: Pool) -> None:
    job = make(FOREVER).start("node1")
    other = make(FOREVER)
    for host in other.settings["nodes"]:
        host["control_port"] = job.settings["nodes"][0]["control_port"]
    with pytest.raises(RemoteError, match=r"cannot listen on port \d+ of node1: Address already in use"):
        other.start("node1")
    with pytest.raises(RemoteError, match="hosts share the directory"):
        pool.remote("node1").run(start_command("python3", f"~/.accel/jobs/{job.id}", 1))
    (job.directory("node1") / "cancel").touch()
    job.exits("node1")


def test_strangers_on_the_control_port_are_sent_away(make: Make) -> None:
    """Who does not know the token is neither told anything nor listened to."""
    job = make(shell("while [ ! -e $HOME/enough ]; do sleep 0.1; done")).start()
    job.await_phase("running")
    host = job.settings["nodes"][0]
    code = (
        "import socket, json, sys\n"
        f"s = socket.create_connection(({host['address']!r}, {host['control_port']}), 5); s.settimeout(5)\n"
        "f = s.makefile('rwb', 0); print(sorted(json.loads(f.readline())))\n"
        'f.write(json.dumps({"from": 1, "nonce": "aa", "proof": "00" * 32}).encode() + b"\\n")\n'
        'f.write(b\'{"phase": "done", "cancel": true}\\n\'); print(f.read())'
    )
    said = job.hosts["node2"].run("python3", "-c", code)
    assert said.split("\n")[:2] == ["['nonce']", "b''"]
    for odd in (b"[" * 1000, b'{"from": Infinity, "nonce": 1, "proof": 2}', b"\xff", b'"x"', b"x" * 5000):
        code = (
            f"import socket; s = socket.create_connection(({host['address']!r}, {host['control_port']}), 5)\n"
            f"s.recv(999); s.sendall({odd!r} + b'\\n'); s.settimeout(5)\n"
            "try: print(s.recv(9))\nexcept ConnectionError: print(b'')"
        )
        assert job.hosts["node2"].run("python3", "-c", code).strip() == "b''"
    for name in job.names:
        (job.hosts.home(name) / "enough").touch()
    assert [result["state"] for result in job.exits()] == ["succeeded", "succeeded"]
