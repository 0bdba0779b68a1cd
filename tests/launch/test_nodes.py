"""Several attempts and several machines (here: several launchers on one, which meet over TCP as elsewhere)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.marks import long
from tests.ports import free_port

from .conftest import Done, Launcher, Run, until

PARK = "\nimport signal\nwhile True: signal.pause()\n"


def accepts(port: str) -> None:
    """Waits until somebody listens there."""

    def connected() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", int(port))) == 0

    until(f"somebody listens at {port}", connected)


def events(launcher: Launcher, log_dir: str = "logs") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (launcher.here / log_dir / "launch.jsonl").read_text().splitlines()]


class Machines:
    """Launchers that are given each other's address."""

    def __init__(self, launcher: Launcher, count: int = 2, address: str = "127.0.0.1") -> None:
        self._launcher, self._count, self._address = launcher, count, address
        self._port = str(free_port())

    def start(self, rank: int, *argv: str, processes: int = 1, **env: str) -> Run:
        return self._launcher.start(
            "--num_machines", str(self._count), "--machine_rank", str(rank), "--main_process_ip", self._address,
            "--main_process_port", self._port, "--num_processes", str(processes * self._count),
            "--log_dir", f"node{rank}", "--shutdown_timeout", "3", *argv, within=env,
        )  # fmt: skip

    def in_pod(self, rank: int, uid: str, script: str, *argv: str) -> Run:
        """As in a pod, which counts the starts of its container."""
        starts = str(self._launcher.tmp / f"{uid}.starts")
        argv = ("--tee", "3", "--shutdown_timeout", "60", *argv, script)
        return self.start(rank, *argv, ACCEL_JOB_ID="2mx", ACCEL_POD_UID=uid, ACCEL_STARTS=starts)

    def both(self, *argv: str, processes: int = 1) -> tuple[Done, Done]:
        runs = [self.start(rank, *argv, processes=processes) for rank in range(2)]
        return runs[0].wait(), runs[1].wait()


FLAKY = """\
import os, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "port", os.environ["MASTER_PORT"])
dist.init_process_group("gloo")
dist.barrier()
if attempt < 2 and dist.get_rank() == dist.get_world_size() - 1: raise ValueError(f"attempt {attempt}")
total = torch.ones(1); dist.all_reduce(total)
print("total", total.item())
"""


def test_restarts(launcher: Launcher) -> None:
    done = launcher("--num_processes", "2", "--max_restarts", "3", "--log_dir", "logs", launcher.script(FLAKY))
    logs = [[launcher.log(rank, attempt) for rank in (0, 1)] for attempt in range(3)]
    assert all(log.startswith(f"attempt {attempt} port ") for attempt, pair in enumerate(logs) for log in pair)
    ports = [pair[0].split()[3] for pair in logs]
    assert len(set(ports)) == 3
    assert "total 2.0" in logs[2][0]
    assert "total 2.0" in logs[2][1]
    assert done.err.count("starting all ranks again") == 2
    assert "(3 of 3 restarts left)" in done.err
    kinds = [
        (event["event"], event.get("attempt", event.get("failure", {}).get("attempt"))) for event in events(launcher)
    ]
    assert kinds == [("attempt", 0), ("failure", 0), ("attempt", 1), ("failure", 1), ("attempt", 2)]


def test_restarts_are_counted(launcher: Launcher) -> None:
    launcher.script("import os, sys; sys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    launcher("--num_processes", "1", "--max_restarts", "2", "--log_dir", "logs", "train.py", code=12)
    assert [event["failure"]["exit_code"] for event in events(launcher) if event["event"] == "failure"] == [10, 11, 12]


def test_the_end_of_restarts(launcher: Launcher) -> None:
    """A launcher that is told to end while it restarts does not start again."""
    launcher.script(
        "import os, signal\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('saving', flush=True))\n"
        "if os.environ['RANK'] == '1': open('listens', 'w').close()\n"
        "while os.environ['RANK'] == '0':\n"
        f"    if os.path.exists('listens'): raise SystemExit(3)\n{PARK}"
    )
    run = launcher.start("--num_processes", "2", "--max_restarts", "9", "--shutdown_timeout", "8", "train.py")
    run.says("saving")
    run.send(signal.SIGTERM)
    done = run.wait()
    assert done.code in (3, 143)
    assert "attempt 1" not in done.out
    launcher.nothing_left()


ALL = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())]); dist.all_reduce(total)
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
print(*(os.environ[key] for key in keys), total.item())
"""


def test_two_machines(launcher: Launcher) -> None:
    first, second = Machines(launcher).both(launcher.script(ALL), processes=2)
    assert (first.code, second.code) == (0, 0), (first, second)
    for rank in range(4):
        words = f"{rank} {rank % 2} 4 2 {rank // 2} {rank // 2} 127.0.0.1 6.0\n"
        assert launcher.log(rank, log_dir=f"node{rank // 2}") == words
    launcher.nothing_left()


def test_the_second_machine_may_come_first(launcher: Launcher) -> None:
    machines = Machines(launcher)
    second = machines.start(1, launcher.script(ALL))
    second.child(guard=False)
    first = machines.start(0, "train.py")
    assert (first.wait().code, second.wait().code) == (0, 0)


@pytest.mark.parametrize("failing", [1, *long(0)])
def test_a_failure_anywhere_ends_all(launcher: Launcher, failing: int) -> None:
    launcher.script(f"import os\nif os.environ['RANK'] == '{failing}': raise SystemExit(7){PARK}")
    runs = Machines(launcher).both("train.py")
    assert [run.code for run in runs] == [7, 7], runs
    for node, run in enumerate(runs):
        assert f"rank {failing} on node {failing} (" in run.err
        assert events(launcher, f"node{node}")[-1]["failure"]["rank"] == failing
    launcher.nothing_left()


@pytest.mark.parametrize("failing", [1, *long(0)])
def test_node_0_reports_a_failure_for_all(launcher: Launcher, failing: int) -> None:
    """A cluster that learns that one pod failed deletes those that still run, with their logs: node 0 fails last."""
    machines = Machines(launcher)
    script = launcher.script(f"import os\nif os.environ['RANK'] == '{failing}': raise SystemExit(7){PARK}")
    runs = [machines.start(rank, script, ACCEL_NODE_0_REPORTS="1") for rank in range(2)]
    done = [run.wait() for run in runs]
    assert [run.code for run in done] == [7, 0], done
    for run in done:
        assert f"rank {failing} on node {failing} (" in run.err


def test_a_node_fails_when_node_0_cannot_report_it(launcher: Launcher) -> None:
    machines = Machines(launcher)
    script = launcher.script(f"print('ready', flush=True){PARK}")
    runs = [machines.start(rank, "--tee", "3", script, ACCEL_NODE_0_REPORTS="1") for rank in range(2)]
    for run in runs:
        run.says("ready")
    runs[0].send(signal.SIGKILL)
    assert runs[1].wait().code == 1
    launcher.nothing_left()


def test_all_machines_start_again_together(launcher: Launcher) -> None:
    launcher.script(FLAKY)
    first, second = Machines(launcher).both("--max_restarts", "2", "train.py")
    assert (first.code, second.code) == (0, 0), (first, second)
    for node in (0, 1):
        ports = [launcher.log(node, attempt, f"node{node}").split()[3] for attempt in range(3)]
        assert len(set(ports)) == 3
        assert "total 2.0" in launcher.log(node, 2, f"node{node}")
        reported = [event["failure"] for event in events(launcher, f"node{node}") if event["event"] == "failure"]
        assert [(one["rank"], one["attempt"], one["message"]) for one in reported] == [
            (1, 0, "ValueError: attempt 0"), (1, 1, "ValueError: attempt 1")
        ]  # fmt: skip


@pytest.mark.parametrize("present", [1, *long(0)])
def test_a_machine_that_does_not_come(launcher: Launcher, present: int) -> None:
    run = Machines(launcher).start(present, "--rdzv_conf", "timeout=2", launcher.script("print('ran')"))
    done = run.wait()
    assert done.code == 1
    said = "node 1 of 2 nodes did not join at " if present == 0 else "node 1 could not reach node 0 at "
    assert done.err.startswith(f"accel launch: {said}"), done
    assert "within 2 s" in done.err
    launcher.nothing_left()


def test_who_came_learns_who_did_not(launcher: Launcher) -> None:
    machines = Machines(launcher, count=3)
    script = launcher.script("print('ran')")
    waiting = machines.start(1, "--rdzv_conf", "timeout=1000", script)
    waiting.child(guard=False)  # it has loaded torch
    first = machines.start(0, "--rdzv_conf", "timeout=12", script)
    for done in (first.wait(), waiting.wait()):
        assert done.code == 1
        assert "node 2 of 3 nodes did not join" in done.err


def test_two_machines_of_one_rank(launcher: Launcher) -> None:
    machines = Machines(launcher)
    script = launcher.script(f"print('ready', flush=True){PARK}")
    first, second = machines.start(0, "--tee", "3", script), machines.start(1, "--tee", "3", script)
    first.says("ready")
    second.says("ready")
    double = machines.start(1, script).wait()
    assert double.code == 1
    assert double.err.startswith("accel launch: machine rank 1 is taken by "), double
    assert "--machine_rank of its own" in double.err
    assert first.process.poll() is None
    first.send(signal.SIGTERM)
    assert first.wait().code == 143
    assert second.wait().code == 143  # it hears of it


def test_node_0_is_found_before_its_name_exists(launcher: Launcher) -> None:
    """By the name of a Service. The ranks get the address of node 0's pod, whose name nobody looks up."""
    script = launcher.script(ALL)
    cluster = {
        "ACCEL_NODES": "2", "ACCEL_MASTER": "no-such-host.invalid", "ACCEL_PORT": str(free_port()),
        "ACCEL_SERVICE": "localhost", "ACCEL_POD_IP": "127.0.0.1",
    }  # fmt: skip
    runs = [
        launcher.start(
            "--num_processes",
            "2",
            "--tee",
            "3",
            "--log_dir",
            f"n{rank}",
            script,
            ACCEL_NODE_RANK=str(rank),
            within=cluster,
        )
        for rank in (1, 0)
    ]
    for run in runs:
        done = run.wait()
        assert done.code == 0, done
        assert " 127.0.0.1 1.0" in done.out


PARKED_ONCE = """\
import os, signal, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("ready in attempt", attempt, flush=True)
if attempt: sys.exit()
def end(*_):
    print("told to end", flush=True)
    while not os.path.exists("saved"): time.sleep(0.01)
    sys.exit(0)
if os.environ["RANK"] == "0": signal.signal(signal.SIGTERM, end)
while True: time.sleep(0.01)
"""


@pytest.mark.parametrize("again", ["pod-1b", *long("pod-1")])
def test_a_launcher_that_was_killed_is_started_again(launcher: Launcher, again: str) -> None:
    """By the kubelet, or in another pod: one failure of the gang costs each node one start."""
    machines = Machines(launcher)
    script = launcher.script(PARKED_ONCE)
    runs = [machines.in_pod(rank, f"pod-{rank}", script) for rank in (0, 1)]
    for run in runs:
        run.says("ready in attempt 0")
    runs[1].send(signal.SIGKILL)
    runs[1].wait()
    second = machines.in_pod(1, again, script)
    runs[0].says("told to end")
    (launcher.here / "saved").touch()
    done = runs[0].wait()
    assert done.code == 1, done
    assert "the launcher on node 1 (" in done.err
    assert "was started again" in done.err
    first = machines.in_pod(0, "pod-0", script)
    assert [run.wait().code for run in (first, second)] == [0, 0], (first.text(), second.text())
    for run in (first, second):
        assert "ready in attempt 1" in run.text()


def test_a_launcher_is_started_again_before_the_others_have_ended(launcher: Launcher) -> None:
    machines = Machines(launcher)
    fails = 'while True:\n    if os.environ["RANK"] == "1" and os.path.exists("fail"): sys.exit(9)\n   '
    script = launcher.script(PARKED_ONCE.replace("while True:", fails))
    runs = [machines.in_pod(rank, f"pod-{rank}", script) for rank in (0, 1)]
    for run in runs:
        run.says("ready in attempt 0")
    (launcher.here / "fail").touch()
    runs[0].says("told to end")
    assert runs[1].wait().code == 9
    second = machines.in_pod(1, "pod-1", script)
    second.says("accel launch: node 1 restarted and is waiting for node 0 to end the previous attempt")
    (launcher.here / "saved").touch()
    assert runs[0].wait().code == 9
    first = machines.in_pod(0, "pod-0", script)
    assert [run.wait().code for run in (first, second)] == [0, 0], (first.text(), second.text())


def test_a_launcher_that_is_told_to_end_tells_the_others(launcher: Launcher) -> None:
    machines = Machines(launcher)
    script = launcher.script(f"print('ready', flush=True){PARK}")
    runs = [machines.start(rank, "--tee", "3", "--max_restarts", "5", script) for rank in (0, 1)]
    for run in runs:
        run.says("ready")
    runs[1].send(signal.SIGTERM)
    assert runs[1].wait().code == 143
    done = runs[0].wait()
    assert done.code == 143
    assert "the launcher on node 1 (" in done.err
    assert "was terminated by SIGTERM" in done.err
    launcher.nothing_left()


@pytest.mark.parametrize("dying", [1, *long(0)])
def test_a_machine_that_falls_silent(launcher: Launcher, dying: int) -> None:
    machines = Machines(launcher)
    script = launcher.script(f"print('ready', flush=True){PARK}")
    runs = [machines.start(rank, "--tee", "3", "--rdzv_conf", "lost_after=6", script) for rank in (0, 1)]
    for run in runs:
        run.says("ready")
    runs[dying].send(signal.SIGKILL)
    done = runs[1 - dying].wait()
    assert done.code == 1, done
    assert ("node 0 is gone" if dying == 0 else "no heartbeat for ") in done.err
    launcher.nothing_left()


def test_told_to_end_while_it_waits_for_others(launcher: Launcher) -> None:
    run = Machines(launcher).start(1, launcher.script("print('ran')"))
    run.child(guard=False)
    while run.process.poll() is None:  # from when on it listens cannot be seen from outside
        run.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(0.5)
    assert run.wait().code in (143, -15)
    launcher.nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve(launcher: Launcher, rank: int) -> None:
    machines = Machines(launcher, address="no-such-host.invalid")
    done = machines.start(rank, "--rdzv_conf", "timeout=1", launcher.script("print('ran')")).wait()
    assert done.code == 1
    assert "no-such-host.invalid" in done.err
    assert "does not resolve" in done.err
    assert done.err.count("\n") == 1


def test_elastic(launcher: Launcher) -> None:
    """torch's own rendezvous: one machine begins, a second one joins, and both go on together."""
    port = str(free_port())
    launcher.script(
        "import os\n"
        "size = os.environ['WORLD_SIZE']\n"
        "print('world of', size, flush=True)\n"
        f"if size == '1':{PARK.replace(chr(10), chr(10) + '    ')}\n"
    )

    def start(name: str) -> Run:
        return launcher.start(
            "--num_machines", "1:2", "--rdzv_backend", "c10d", "--main_process_ip", "localhost",
            "--main_process_port", port, "--num_processes", "1",
            "--rdzv_conf", "last_call_timeout=1", "--log_dir", name, "--tee", "3", "--shutdown_timeout", "3",
            "train.py",
        )  # fmt: skip

    first = start("a")
    first.says("world of 1")
    second = start("b")
    assert (first.wait().code, second.wait().code) == (0, 0)
    assert "world of 2" in first.text()
    assert "world of 2" in second.text()


def test_elastic_machines_look_for_a_pod_once_its_service_answers(launcher: Launcher) -> None:
    """A pod's name does not exist before the pod. This one never does."""
    port = str(free_port())
    flags = (
        "--num_machines", "1:2", "--rdzv_backend", "c10d", "--main_process_ip", "no-such-pod.invalid",
        "--main_process_port", port, "--num_processes", "1", "--rdzv_conf", "timeout=120,read_timeout=1", "train.py",
    )  # fmt: skip
    launcher.script("print('ran')")
    with socket.create_server(("127.0.0.1", int(port))) as server:
        run = launcher.start(*flags, ACCEL_SERVICE="127.0.0.1")
        server.settimeout(120)
        server.accept()[0].close()
        done = run.wait()
    assert done.code == 1, done
    assert "no-such-pod.invalid" in done.err
    launcher.nothing_left()


ELASTIC = ("--num_machines", "1:2", "--rdzv_backend", "c10d", "--num_processes", "1")


@pytest.mark.parametrize("service", [{}, {"ACCEL_SERVICE": "127.0.0.1"}], ids=["", "service"])
@pytest.mark.parametrize(
    ("signum", "code", "line"),
    [
        (signal.SIGTERM, 143, "accel launch: received SIGTERM; all ranks on this node were terminated\n"),
        (signal.SIGALRM, 86, "accel launch: the time limit of 100 s is over; all ranks on this node were terminated\n"),
    ],
)
def test_an_elastic_machine_that_waits_for_node_0_is_told_to_end(
    launcher: Launcher, signum: signal.Signals, code: int, line: str, service: dict[str, str]
) -> None:
    """The alarm is the clock of the time limit."""
    flags = ("--main_process_ip", "no-such-pod.invalid", "--main_process_port", str(free_port()))
    limit = {"ACCEL_TIME_LIMIT": "100", "ACCEL_TIME_LIMIT_EXIT": "86,86"}
    run = launcher.start(*ELASTIC, *flags, launcher.script("print('ran')"), within={**service, **limit})
    until("it handles signals", lambda: _handles(run.pid, signum))
    run.send(signum)
    done = run.wait()
    assert (done.code, done.err) == (code, line), done
    launcher.nothing_left()


def _handles(pid: int, signum: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_elastic_machines_that_do_not_meet_say_so_in_one_line(launcher: Launcher) -> None:
    script, port = launcher.script("print('ran')"), str(free_port())
    common = ("--main_process_port", port, "--rdzv_conf", "timeout=1")
    done = launcher(*ELASTIC, "--main_process_ip", "no-such-pod.invalid", *common, script, code=1)
    assert f"could not reach node 0 at no-such-pod.invalid:{port} (the name does not resolve" in done.err
    two = ("--num_machines", "2:2", "--rdzv_backend", "c10d", "--num_processes", "2")
    alone = launcher(*two, "--main_process_ip", "localhost", *common, script, code=1)
    why = "RendezvousTimeoutError; perhaps fewer than 2 machines joined"
    assert f"the rendezvous at localhost:{port} failed: {why}" in alone.err
    assert (done.err.count("\n"), alone.err.count("\n")) == (1, 1)


def test_elastic_machines_end_together(launcher: Launcher) -> None:
    """The first machine keeps the store in which they meet: it must not go while another still works."""
    port = str(free_port())
    launcher.script(
        "import os, time\n"
        "if os.environ['MACHINE'] == 'a':\n"
        "    open('ended', 'w').close()\n"
        "else:\n"
        "    while not os.path.exists('ended'): time.sleep(0.01)\n"
        "    time.sleep(0.9)\n"
    )
    flags = (
        "--num_machines", "2:2", "--rdzv_backend", "c10d", "--main_process_ip", "localhost",
        "--main_process_port", port, "--num_processes", "2", "--shutdown_timeout", "3", "train.py",
    )  # fmt: skip
    first = launcher.start(*flags, MACHINE="a")
    accepts(port)
    second = launcher.start(*flags, MACHINE="b")
    done = (second.wait(), first.wait())
    assert [one.code for one in done] == [0, 0], done


GROWING = """
import os, signal, sys
open(os.environ["MACHINE"] + "-in-" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()
while True:
    if os.path.exists("fails-" + os.environ["MACHINE"]):
        os.remove("fails-" + os.environ["MACHINE"])
        sys.exit(3)
    signal.sigtimedwait([], 0.02)
"""


def growing(launcher: Launcher, *flags: str, machines: str = "abc") -> tuple[dict[str, Run], Callable[[str], Run]]:
    """Machines of a world that may grow, the first of which keeps the store, with a rank each that runs; and what
    starts another one."""
    port = str(free_port())
    launcher.script(GROWING)

    def start(name: str) -> Run:
        return launcher.start(
            "--num_machines", f"2:{len(machines)}", "--rdzv_backend", "c10d", "--main_process_ip", "localhost",
            "--main_process_port", port, "--num_processes", "2", "--shutdown_timeout", "3",
            "--rdzv_conf", f"is_host={int(name == 'a')},last_call_timeout=120,lost_after=2", *flags, "train.py",
            MACHINE=name,
        )  # fmt: skip

    runs = {name: start(name) for name in machines[:1]}
    accepts(port)
    runs |= {name: start(name) for name in machines[1:]}
    in_attempt(launcher, 0, machines)
    return runs, start


def in_attempt(launcher: Launcher, attempt: int, machines: str) -> None:
    marks = [launcher.here / f"{name}-in-{attempt}" for name in machines]
    until(f"all run attempt {attempt}", lambda: all(mark.exists() for mark in marks))


@pytest.mark.parametrize("failing", ["a", "b"])
def test_elastic_machines_end_when_a_rank_of_one_fails(launcher: Launcher, failing: str) -> None:
    runs, _ = growing(launcher)
    (launcher.here / f"fails-{failing}").touch()
    done = [run.wait() for run in runs.values()]
    assert [one.code for one in done] == [3, 3, 3], done
    assert all("failed first, in attempt 0: exited with code 3\n" in one.err for one in done), done
    launcher.nothing_left()


def test_elastic_machines_end_when_one_falls_silent(launcher: Launcher) -> None:
    runs, _ = growing(launcher)
    gone = [runs["b"].child(guard=guard) for guard in (True, False)]
    for pid in (*gone, runs["b"].pid):
        os.kill(pid, signal.SIGKILL)
    done = [runs[name].wait() for name in "ac"]
    assert [one.code for one in done] == [1, 1], done
    assert all("no heartbeat for" in one.err for one in done), done


def test_a_failure_costs_an_elastic_world_one_restart(launcher: Launcher) -> None:
    """On whichever machine: the second failure is the last."""
    runs, _ = growing(launcher, "--max_restarts", "1", machines="ab")
    (launcher.here / "fails-b").touch()
    in_attempt(launcher, 1, "ab")
    (launcher.here / "fails-a").touch()
    done = [run.wait() for run in runs.values()]
    assert [one.code for one in done] == [3, 3], done
    assert [one.err.count("starting all ranks again (1 of 1 restarts left)") for one in done] == [1, 1], done
    launcher.nothing_left()


def test_an_elastic_world_goes_on_with_another_machine_for_one_that_is_told_to_end(launcher: Launcher) -> None:
    runs, start = growing(launcher, "--max_restarts", "1")
    runs["c"].send(signal.SIGTERM)
    assert runs["c"].wait().code == 143
    runs["c"] = start("d")
    in_attempt(launcher, 1, "ab")
    in_attempt(launcher, 0, "d")
    (launcher.here / "fails-b").touch()
    done = [run.wait() for run in runs.values()]
    assert [one.code for one in done] == [3, 3, 3], done


def test_elastic_failure(launcher: Launcher) -> None:
    launcher.script("import sys; sys.exit(9)")
    done = launcher(
        "--num_machines", "1", "--rdzv_backend", "c10d", "--main_process_port", str(free_port()),
        "--num_processes", "2", "train.py", code=9,
    )  # fmt: skip
    assert "failed first" in done.err
