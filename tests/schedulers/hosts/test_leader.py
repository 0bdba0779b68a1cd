"""What the leading supervisor decides, for hosts that are played by this test."""

from __future__ import annotations

import ast
import io
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schedulers.hosts import bundle
from schedulers.hosts.supervisor import leader
from schedulers.hosts.supervisor.leader import Leader
from schedulers.slurm import submit as slurm_submit

from .supervised import start_command

REPORT = {"failure": None, "refused": "exit_code", "words": "no luck", "ended": 1.0}


def _settings(nodes: int, spares: int, **others: Any) -> dict[str, Any]:
    hosts = [{"name": f"h{index}", "address": f"10.0.0.{index}"} for index in range(nodes + spares)]
    return {"nodes": hosts[:nodes], "spares": hosts[nodes:], "heartbeat_s": 5, "start_timeout_s": 60,
            "max_restarts": 0, "time_limit_s": None, **others}  # fmt: skip


class Play:
    """Hosts that do what they are told; `codes` says how launches end, by (attempt, host)."""

    def __init__(self, nodes: int, spares: int = 0, **others: Any) -> None:
        self.settings = _settings(nodes, spares, **others)
        self.now = 0.0
        self.leader = Leader(self.settings, 0, self.now)
        self.hosts = {index: self._state("waiting") for index in range(nodes + spares)}
        self.codes: dict[tuple[int, int], int] = {}
        self.started: list[tuple[int, list[int]]] = []

    def _state(self, phase: str, **facts: Any) -> dict[str, Any]:
        return {"phase": phase, "attempt": 0, "port": 0, "code": None, "report": None, "message": "", "cancel": False,
                "queue": "", "holds": False, "waits": "", **facts}  # fmt: skip

    def lose(self, host: int) -> None:
        """This one is heard of no more; if it led, the next one does."""
        del self.hosts[host]
        if host == self.leader.order()["leader"]:
            self.now += 5.1
            last = {**self.leader.order(), "silent_s": 5.1}
            self.leader = Leader(self.settings, min(self.hosts), self.now, last)

    def go(self, seconds: float = 200) -> dict[str, Any]:
        """Plays until the job has ended everywhere, for so long at most. The last order."""
        until = self.now + seconds
        while self.now < until and not self.turn():
            self.now += 0.5
        return self.leader.order()

    def turn(self, late: Callable[[], bool] = lambda: False) -> bool:
        """One exchange of states and orders. True when the job has ended everywhere. A state that is `late` is heard
        of at the next one."""
        order = self.leader.order()
        for index, state in self.hosts.items():
            self._obey(index, state, order)
            if not late():
                self.leader.receive_state(index, dict(state), self.now)
        if self.leader.step(self.now):
            return True
        if self.leader.do == "go" and (self.leader.attempt, self.leader.members) not in self.started:
            self.started.append((self.leader.attempt, list(self.leader.members)))
        return False

    def _queue(self, index: int, state: dict[str, Any], my_turn: bool) -> None:
        state["holds"] = state["holds"] or my_turn

    def _release(self, index: int, state: dict[str, Any]) -> None:
        state["holds"] = False

    def _obey(self, index: int, state: dict[str, Any], order: dict[str, Any]) -> None:
        do, phase, attempt = order["do"], state["phase"], order["attempt"]
        mine = index in order["members"]
        if index in order["release"]:
            self._release(index, state)
        if do == "queue":
            self._queue(index, state, order["turn"] == index)
        elif do == "end":
            self._release(index, state)
            state["phase"] = "ended"
        elif do == "stop":
            state.update(phase="stopped", attempt=attempt)
        elif phase == "waiting" and do != "wait":
            state["phase"] = "ready"
        elif do == "setup" and phase == "stopped":
            state.update(phase="ready", attempt=attempt)
        elif do == "arm" and mine and phase == "ready":
            state.update(phase="armed", attempt=attempt, port=1000 + attempt)
        elif do == "go" and mine and phase == "armed":
            state["phase"] = "running"
        elif phase == "running" and (attempt, index) in self.codes:
            state.update(phase="done", code=self.codes[attempt, index], report=REPORT)


def _ended(order: dict[str, Any]) -> tuple[str, str, int]:
    return order["status"]["state"], order["status"]["reason"], order["status"]["attempt"]


def test_all_run_and_end() -> None:
    play = Play(3)
    play.codes = {(0, index): 0 for index in range(3)}
    order = play.go()
    assert _ended(order) == ("succeeded", "none", 0)
    assert (order["address"], order["port"]) == ("10.0.0.0", 1000)
    assert play.started == [(0, [0, 1, 2])]


def test_nothing_runs_before_all_are_there() -> None:
    play = Play(3)
    del play.hosts[2]
    order = play.go()
    assert _ended(order) == ("failed", "node_failure", 0)
    assert order["status"]["message"] == "h2 did not connect within 60 s: the job did not start"
    assert play.started == []


def test_a_spare_stands_in_for_a_host_that_does_not_come() -> None:
    play = Play(2, 1)
    del play.hosts[1]
    play.codes = {(0, 0): 0, (0, 2): 0}
    assert _ended(play.go()) == ("succeeded", "none", 0)
    assert play.started == [(0, [0, 2])]


def test_the_first_failure_by_the_time_told_is_the_jobs() -> None:
    play = Play(2)
    play.go(5)
    failure = {"rank": 1, "host": "h1", "how": "failed", "message": "boom", "cause": "",
               "reason": "out_of_memory", "exit_code": 9, "time": 7.0}  # fmt: skip
    for index, time in ((0, 8.0), (1, 7.0)):
        report = {**REPORT, "failure": {**failure, "rank": index, "time": time}}
        play.hosts[index].update(phase="done", code=9, report=report)
    status = play.go()["status"]
    assert (status["reason"], status["exit_code"], status["message"]) == ("out_of_memory", 9, "rank 1: boom")


def test_a_failed_attempt_is_followed_by_others_while_there_are_any_left() -> None:
    play = Play(2, max_restarts=2)
    play.codes = {(0, 1): 3, (1, 0): 4, (2, 1): 5}
    order = play.go()
    assert _ended(order) == ("failed", "exit_code", 2)
    assert (order["status"]["exit_code"], order["status"]["message"]) == (5, "h1: no luck")
    assert play.started == [(attempt, [0, 1]) for attempt in range(3)]


def test_a_launcher_that_a_signal_ended_is_named_with_it() -> None:
    """It had no time to report, and the last words in its log are a rank's."""
    play = Play(2)
    play.codes = {(0, 1): 137}
    status = play.go()["status"]
    assert (status["exit_code"], status["message"]) == (137, "h1: accel launch was killed by SIGKILL")


def test_lost_hosts_are_named_with_their_silence() -> None:
    play = Play(3)
    play.go(5)
    play.lose(2)
    status = play.go()["status"]
    assert (status["reason"], status["message"], status["fenced"]) == (
        "node_failure",
        "h2 was silent for 5.5 s",
        False,
    )


@pytest.mark.parametrize(("lost", "members"), [(1, [0, 2]), (0, [1, 2])])
def test_spares_come_last(lost: int, members: list[int]) -> None:
    play = Play(2, 1, max_restarts=1)
    play.go(5)
    play.lose(lost)
    play.codes = {(1, index): 0 for index in members}
    order = play.go()
    assert _ended(order) == ("succeeded", "none", 1)
    assert order["address"] == f"10.0.0.{members[0]}"
    assert play.started == [(0, [0, 1]), (1, members)]


def test_no_attempt_begins_before_a_lost_host_has_killed_its_ranks() -> None:
    play = Play(2, 1, max_restarts=1)
    play.go(5)
    play.lose(1)
    while play.leader.do != "stop":
        play.go(0.5)
    lost_at = play.now - 0.5
    while play.leader.do == "stop":
        play.go(0.5)
    assert play.now - 0.5 - lost_at >= 2 * 5 / leader.BEATS + leader.KILL_S
    assert play.leader.attempt == 1


@pytest.mark.parametrize(("lost", "at_once"), [((), False), ((2,), False), ((1, 2), True)])
def test_hosts_that_others_may_go_on_without_have_no_grace(lost: tuple[int, ...], at_once: bool) -> None:
    play = Play(3)
    play.go(5)
    for host in lost:
        play.lose(host)
    if not lost:
        play.hosts[0]["cancel"] = True
    while play.leader.do != "stop":
        play.leader.receive_state(0, dict(play.hosts[0]), play.now)
        play.go(0.5)
    assert play.leader.order()["at_once"] is at_once


def test_cancel_ends_an_attempt_that_is_being_ended_anyway() -> None:
    play = Play(2, max_restarts=9)
    play.go(5)
    play.hosts[1]["cancel"] = True
    play.codes = {(0, 0): 1}
    assert _ended(play.go()) == ("cancelled", "user", 0)


@settings(deadline=None)
@given(
    nodes=st.integers(1, 4),
    spares=st.integers(0, 3),
    restarts=st.integers(0, 3),
    losses=st.lists(st.tuples(st.integers(0, 6), st.floats(0.5, 20)), max_size=4),
    codes=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 6)), st.sampled_from([0, 1])),
)
def test_whatever_happens_a_job_ends_whole_and_once(
    nodes: int, spares: int, restarts: int, losses: list[tuple[int, float]], codes: dict[tuple[int, int], int]
) -> None:
    play = Play(nodes, spares, max_restarts=restarts, time_limit_s=30)
    play.codes = codes
    for host, after in losses:
        play.go(after)
        if host in play.hosts and len(play.hosts) > 1 and play.leader.status is None:
            play.lose(host)
    order = play.go(1000)
    assert order["do"] == "end"
    assert order["status"]["state"] in ("succeeded", "failed")
    assert len({attempt for attempt, _ in play.started}) == len(play.started)
    assert len(play.started) <= restarts + 1
    for _, members in play.started:
        assert len(set(members)) == nodes
    if order["status"]["state"] == "succeeded":
        attempt, members = play.started[-1]
        assert all(codes.get((attempt, member)) == 0 for member in members)


def test_at_most_one_side_of_a_cut_goes_on() -> None:
    """Every way to part the hosts of every size of job: each side as it sees the other fall silent."""
    for nodes in range(1, 5):
        for spares in range(4):
            for bits in range(1, 2 ** (nodes + spares) - 1):
                sides = [{i for i in range(nodes + spares) if bool(bits >> i & 1) is here} for here in (True, False)]
                went_on = 0
                for side in sides:
                    play = Play(nodes, spares, max_restarts=1)
                    play.go(5)
                    if 0 not in side:
                        play.lose(0)
                    for index in sorted(set(play.hosts) - side):
                        del play.hosts[index]
                    if play.leader.order()["leader"] not in side:
                        last = {**play.leader.order(), "leader": 0, "silent_s": 5.0}
                        play.leader = Leader(play.settings, min(side), play.now, last)
                    play.codes = {(attempt, index): 0 for attempt in (0, 1) for index in range(nodes + spares)}
                    play.go(0.5)
                    broken = set(range(nodes)) - side
                    play.codes = {key: 0 for key in play.codes if key[0] == 1}
                    play.go()
                    went_on += bool(broken) and any(attempt == 1 for attempt, _ in play.started)
                assert went_on <= 1, (nodes, spares, bits)


def test_a_leader_that_most_hosts_have_lost_does_not_run_beside_them() -> None:
    """All members are on its side of the cut, but the spares on the other are enough to start again without them."""
    play = Play(1, 2, max_restarts=1)
    play.go(5)
    for spare in (1, 2):
        play.lose(spare)
    order = play.go()
    assert _ended(order) == ("failed", "node_failure", 0)
    assert order["status"]["fenced"]
    assert order["status"]["message"].startswith("h1 was silent for 5.5 s, h2 was silent for 5.5 s")


@pytest.mark.parametrize(("nodes", "spares", "restarts"), [(1, 2, 0), (2, 1, 1), (3, 4, 0)])
def test_spares_that_are_lost_are_no_harm_where_they_cannot_go_on_without_the_members(
    nodes: int, spares: int, restarts: int
) -> None:
    play = Play(nodes, spares, max_restarts=restarts)
    play.go(5)
    for spare in range(nodes, nodes + spares):
        play.lose(spare)
    play.go(20)
    play.codes = {(0, index): 0 for index in range(nodes)}
    order = play.go()
    assert (_ended(order), order["status"]["fenced"]) == (("succeeded", "none", 0), False)


def test_spares_that_lost_all_members_do_not_speak_for_the_job() -> None:
    play = Play(1, 2)
    play.go(5)
    play.lose(0)
    order = play.go()
    assert (_ended(order), order["status"]["fenced"]) == (("failed", "node_failure", 0), True)


def test_of_a_cut_network_one_side_at_most_runs_the_job() -> None:
    for nodes in range(1, 4):
        for spares in range(5):
            for bits in range(2 ** (nodes + spares - 1) - 1):
                here = {0, *(index for index in range(1, nodes + spares) if bits >> (index - 1) & 1)}
                there = set(range(nodes + spares)) - here
                run = 0
                for side in (here, there):
                    play = Play(nodes, spares, max_restarts=1)
                    play.go(5)
                    last = {**play.leader.order(), "silent_s": 5.0}
                    play.hosts = {index: play.hosts[index] for index in side}
                    if 0 not in side:
                        play.leader = Leader(play.settings, min(side), play.now, last)
                    run += play.go()["do"] == "go"
                assert run <= 1, (nodes, spares, here)


def _taken_over(play: Play) -> dict[str, Any]:
    play.lose(0)
    return play.go()


def test_who_takes_over_before_anything_began_begins_nothing() -> None:
    play = Play(2, 3, max_restarts=1)
    del play.hosts[1]
    play.go(5)
    order = _taken_over(play)
    assert (_ended(order), order["status"]["fenced"]) == (("failed", "node_failure", 0), True)
    assert play.started == []


def test_who_takes_over_a_job_that_was_being_cancelled_does_not_start_it_again() -> None:
    play = Play(2, 1, max_restarts=1)
    play.go(5)
    play.hosts[0]["cancel"] = True
    play.leader.receive_state(0, dict(play.hosts[0]), play.now)
    play.leader.step(play.now)
    assert play.leader.do == "stop"
    assert _ended(_taken_over(play)) == ("cancelled", "user", 0)
    assert len(play.started) == 1


def test_who_takes_over_a_job_that_has_ended_lets_it_end() -> None:
    play = Play(2, 1, max_restarts=1)
    play.codes = {(0, 0): 0, (0, 1): 0}
    play.go(5)
    assert play.leader.do == "end"
    order = _taken_over(play)
    assert (_ended(order), len(play.started)) == (("succeeded", "none", 0), 1)


def test_a_host_whose_disk_was_full_is_named_at_the_end() -> None:
    play = Play(2)
    play.go(5)
    play.hosts[1]["warning"] = "its disk was full: lines of its logs are missing"
    play.codes = {(0, 0): 0, (0, 1): 0}
    status = play.go()["status"]
    assert (status["state"], status["message"]) == (
        "succeeded", "h1: its disk was full: lines of its logs are missing",
    )  # fmt: skip


def test_the_program_is_one_file_that_older_pythons_read() -> None:
    packed = bundle.program()
    assert packed == bundle.program.__wrapped__()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        names = archive.namelist()
        assert {"__main__.py", "schedulers/hosts/supervisor/main.py", "schedulers/node/listen.py"} <= set(names)
        for name in names:
            tree = ast.parse(archive.read(name), feature_version=(3, 8))
            roots = {
                (node.module or "").partition(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and not node.level
            } | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            assert roots <= {*sys.stdlib_module_names, "schedulers"}, name


@pytest.mark.parametrize("program", [bundle.program, slurm_submit.program])
def test_a_packed_program_finds_what_is_packed_with_it(program: Callable[[], bytes]) -> None:
    with zipfile.ZipFile(io.BytesIO(program())) as archive:
        names = set(archive.namelist())
        for name in names:
            for node in ast.walk(ast.parse(archive.read(name))):
                if isinstance(node, ast.ImportFrom) and node.level:
                    package = Path(name).parents[node.level - 1] / (node.module or "").replace(".", "/")
                    for alias in node.names:
                        assert {f"{package}.py", f"{package / alias.name}.py"} & names, (name, ast.unparse(node))
    assert Path(leader.__file__).name == "leader.py"


def test_a_directory_without_instructions_is_refused(tmp_path: Path) -> None:
    (tmp_path / bundle.PROGRAM).write_bytes(bundle.program())
    argv = start_command(sys.executable, str(tmp_path), 0)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/settings.json cannot be read:")
    assert done.stderr.count("\n") == 1


class Machine:
    """What the jobs on one host share: its slots, and the tickets of those that wait."""

    def __init__(self, number: int, slots: int) -> None:
        self.number, self.free = number, slots
        self.tickets: set[int] = set()


class Queued(Play):
    """A job whose hosts are machines that other jobs have too."""

    def __init__(self, number: int, machines: list[Machine], nodes: int) -> None:
        super().__init__(nodes, len(machines) - nodes, max_restarts=2)
        self.number, self.machines = number, machines
        for index, state in self.hosts.items():
            state["queue"] = str(machines[index].number)

    def _queue(self, index: int, state: dict[str, Any], my_turn: bool) -> None:
        machine = self.machines[index]
        if not my_turn:
            machine.tickets.discard(self.number)
            state["waits"] = ""
        elif not state["holds"]:
            machine.tickets.add(self.number)
            state["waits"] = "for its turn"
            if min(machine.tickets) == self.number and machine.free:
                machine.free -= 1
                machine.tickets.discard(self.number)
                state.update(holds=True, waits="")

    def _release(self, index: int, state: dict[str, Any]) -> None:
        self.machines[index].tickets.discard(self.number)
        self.machines[index].free += state["holds"]
        state["holds"] = False

    def _obey(self, index: int, state: dict[str, Any], order: dict[str, Any]) -> None:
        if order["do"] != "queue":
            self.machines[index].tickets.discard(self.number)
            state["waits"] = ""
        super()._obey(index, state, order)
        if state["phase"] == "running":
            assert state["holds"], "it runs where it has no slots"

    def lose(self, host: int) -> None:
        self._release(host, self.hosts[host])
        super().lose(host)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
@example(6671)  # a host got its turn before it was known to have released, and took and dropped its slots for ever
def test_jobs_on_the_same_hosts_never_wait_for_each_other_in_a_circle(seed: int) -> None:
    """Any jobs over any of the hosts in any order, exchanging messages in any order, and losing hosts to restarts."""
    chance = random.Random(seed)
    count = chance.randint(2, 4)
    machines = [Machine(number, chance.randint(1, 2)) for number in range(count)]
    jobs = []
    for number in range(chance.randint(2, 5)):
        size = chance.randint(1, count)
        jobs.append(Queued(number, chance.sample(machines, size), chance.randint(1, size)))
    alive, losses = list(jobs), 3
    for turn in range(400):
        for job in chance.sample(alive, len(alive)):
            job.now += 0.5
            if losses and len(job.hosts) > 1 and chance.random() < 0.05:
                losses -= 1
                job.lose(chance.choice(sorted(job.hosts)))
            if turn > 40 or chance.random() < 0.05:
                job.codes = {(attempt, index): 0 for attempt in range(4) for index in range(count)}
            if job.turn(late=lambda: chance.random() < 0.3):
                alive.remove(job)
    assert not alive, [(job.number, job.leader.order()) for job in alive]
    assert all(job.leader.order()["status"] is not None for job in jobs)


def test_a_restart_keeps_its_slots_and_a_spare_waits_for_its_own() -> None:
    machines = [Machine(0, 1), Machine(1, 1), Machine(2, 1)]
    job = Queued(1, [machines[1], machines[2], machines[0]], nodes=2)
    job.go(20)
    assert [machine.free for machine in machines] == [1, 0, 0]
    job.codes = {(0, 0): 1}
    job.go(20)
    assert (job.leader.attempt, [machine.free for machine in machines]) == (1, [1, 0, 0])
    machines[0].free = 0  # another job has what the spare needs
    job.lose(1)
    order = job.go(20)
    assert (order["do"], order["members"], order["turn"]) == ("queue", [0, 2], 2)
    assert machines[1].free == 1  # of a later queue: nobody may wait for it because of this job
    stale = Leader(job.settings, 0, 0.0)  # one that has told host 0 to release and hears of the spare first
    stale.do, stale.members = "queue", [0, 2]
    for index, queue in ((0, "1"), (2, "0")):
        state = {**job.hosts[index], "phase": "waiting", "queue": queue, "waits": "x" * index}
        stale.receive_state(index, {**state, "holds": not index}, 0.0)
    stale.step(0.0)
    assert (stale.order()["turn"], stale.order()["release"]) == (2, [0])
    stale.receive_state(2, {**state, "holds": True, "waits": ""}, 0.0)
    stale.step(0.0)
    assert (stale.order()["do"], stale.order()["turn"], stale.order()["release"]) == ("queue", 2, [0])
    stale.receive_state(0, {**state, "queue": "1", "holds": False, "waits": ""}, 0.0)
    stale.step(0.0)
    assert (stale.order()["do"], stale.order()["turn"], stale.order()["release"]) == ("queue", 0, [])
    machines[0].free = 1
    job.codes = {(2, index): 0 for index in range(3)}
    assert _ended(job.go()) == ("succeeded", "none", 2)


def test_a_job_that_waits_in_a_queue_can_be_cancelled_and_fails_with_its_host() -> None:
    machine = Machine(0, 0)
    job = Queued(1, [machine], nodes=1)
    order = job.go(20)
    assert (order["do"], order["waits"]) == ("queue", "for its turn")
    job.hosts[0]["cancel"] = True
    assert _ended(job.go()) == ("cancelled", "user", 0)
    two = Queued(2, [Machine(0, 1), machine], nodes=2)
    two.go(20)
    two.lose(1)
    assert _ended(two.go())[:2] == ("failed", "node_failure")
    assert two.machines[0].free == 1
