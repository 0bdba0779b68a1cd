"""The decisions of the leading supervisor: from the hosts' states to one order for all of them.

Pure: no clock, socket or process. Hosts send their complete state (see `receive_state`), the leader its complete order
(see `order`), again and again.

A host's state: {"phase", "attempt", "port", "code", "report", "message", "warning", "cancel", "queue", "holds",
"waits"}, where `phase` is one of waiting, setup, ready, failed, armed, running, done, stopped, ended.
queue: id of the host's queue; holds: the job has its slots there; waits: the reason if not.
An order: {"do", "attempt", "members", "address", "port", "leader", "lost", "restarts_left", "cause", "status",
"at_once", "turn", "release", "waits"}, where `do` is one of wait, queue, setup, arm, go, stop, end.
cause: the reason of a stop; at_once: without grace, for other hosts may continue without these;
turn: the host that acquires its slots now: all jobs acquire in the order of the queues' ids, to avoid deadlocks;
release: later hosts, which release their slots while that one waits; waits: the reason why it does.
"""

from __future__ import annotations

import signal

from .documents import job_status

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    State = dict[str, Any]
    Order = dict[str, Any]

FAILURE_WAIT_S = 3.0  # for the reports of the other members
BEATS = 10  # messages within a heartbeat limit
KILL_S = 1.0  # for a host to kill its ranks


class Leader:
    """One leader's view of its job. `status`: the job's final status; None before its end.

    fenced: this side has too few hosts to decide for the job.
    """

    def __init__(self, settings: dict[str, Any], own: int, now: float, last: Order | None = None) -> None:
        """Start to lead. `last`: the last order of the previous leader, which was lost."""
        self._settings = settings
        self._hosts = settings["nodes"] + settings["spares"]
        self._required_hosts = len(settings["nodes"])
        self._heartbeat_s = float(settings["heartbeat_s"])
        self._index = own
        self._began = self.since = now
        self._states: dict[int, State] = {}
        self._last_heard: dict[int, float] = {}
        self._lost_hosts: dict[int, float] = {}  # lost hosts, and how long they had been silent
        self._former_leader = own  # of the last attempt: with it, half of the hosts are a quorum
        self._lost_end_at = now  # from then on nothing runs on the lost hosts
        self._cause: dict[str, Any] | None = None
        self._first_failure: float | None = None
        self._stages = {
            "wait": self._wait,
            "queue": self._queue,
            "setup": self._setup,
            "arm": self._arm,
            "go": self._go,
            "stop": self._stop,
        }
        self._next_in_queue: int | None = None
        self._release: list[int] = []  # hosts that have not yet reported it
        self._waiting_for = ""
        self.do = "wait"
        self.attempt = int(settings.get("attempt", 0))
        self.members: list[int] = []
        self.restarts_left = int(settings["max_restarts"])
        self.address, self.port = "", 0
        self.status: dict[str, Any] | None = None
        self.fenced = False
        self._nothing_started = False
        if last is not None:
            self._take_over(last, now)

    def receive_state(self, index: int, state: State, now: float) -> None:
        """Record a host's state. A host that was given up stays given up."""
        if index not in self._lost_hosts:
            self._states[index] = state
            self._last_heard[index] = now

    def order(self) -> Order:
        return {
            "do": self.do,
            "attempt": self.attempt,
            "members": self.members,
            "address": self.address,
            "port": self.port,
            "leader": self._index,
            "lost": sorted(self._lost_hosts),
            "restarts_left": self.restarts_left,
            "cause": self._cause,
            "status": self.status,
            "at_once": not self._has_quorum(),
            "turn": self._next_in_queue,
            "release": self._release,
            "waits": self._waiting_for,
        }

    def ages(self, now: float) -> dict[str, float]:
        """Return the seconds since the last message of each host."""
        return {str(index): round(now - heard_at, 3) for index, heard_at in sorted(self._last_heard.items())}

    def step(self, now: float) -> bool:
        """Decide the next order from the hosts' states. Return True if the job has ended on all hosts that answer."""
        if self.do == "end":
            alive = [index for index in self._states if now - self._last_heard[index] <= self._heartbeat_s]
            return all(self._states[index]["phase"] == "ended" for index in alive if index != self._index)
        previous = None
        while previous != (self.do, self.attempt, self.status is None):
            previous = (self.do, self.attempt, self.status is None)
            self._check_silence(now)
            self._check_ends(now)
            if self.do != "end":
                self._stages[self.do](now)
        return False

    # The stages, in their order.

    def _wait(self, now: float) -> None:
        present = sorted(self._states)
        node_indices = range(self._required_hosts)
        timed_out = now - self._began >= self._settings["start_timeout_s"]
        if all(index in self._states for index in node_indices) or (timed_out and len(present) >= self._required_hosts):
            self.members = present[: self._required_hosts]
            self._enter("queue", now)
        elif timed_out:
            missing = ", ".join(self._name(index) for index in node_indices if index not in self._states)
            limit = self._settings["start_timeout_s"]
            message = f"{missing} did not connect within {limit:g} s: the job did not start"
            self._finish(job_status("failed", "node_failure", message), now)

    def _queue(self, now: float) -> None:
        """Have one host after another acquire its slots, in the order of their queues' ids."""
        order = sorted(self.members, key=lambda index: (self._states[index]["queue"], index))
        holding = [index for index in order if self._states[index]["holds"]]
        self._release = [index for index in self._release if index in holding]
        if self._release:
            return
        if holding == order:
            self._enter("setup", now)
            return
        self._next_in_queue = next(index for index in order if index not in holding)
        self._waiting_for = self._states[self._next_in_queue]["waits"]
        if self._waiting_for:
            self._release = [index for index in order[order.index(self._next_in_queue) :] if index in holding]

    def _setup(self, now: float) -> None:
        if self._all("ready"):
            self._enter("arm", now)

    def _arm(self, now: float) -> None:
        if self._all("armed", this_attempt=True):
            first = self.members[0]
            self.address, self.port = self._hosts[first]["address"], self._states[first]["port"]
            self._former_leader = self._index
            self._enter("go", now)

    def _go(self, now: float) -> None:
        limit = self._settings["time_limit_s"]
        ended = [index for index in self.members if self._in_phase(index, "done")]
        failed = [index for index in ended if self._states[index]["code"] != 0]
        if failed:
            failure = self._failure(failed)
            # Launchers notice that a host is gone before its silence reaches the heartbeat limit.
            wait_s = self._heartbeat_s + 1 if failure["reason"] == "node_failure" else FAILURE_WAIT_S
            if self._first_failure is None:
                self._first_failure = now
            if len(ended) == len(self.members) or now - self._first_failure >= wait_s:
                self._stop_for(failure, now)
        elif len(ended) == len(self.members):
            self._finish(job_status("succeeded", "none", "", exit_code=0), now)
        elif limit is not None and now - self.since >= limit:
            self._stop_for(job_status("failed", "time_limit", f"its time limit of {limit:g} s was reached"), now)

    def _stop(self, now: float) -> None:
        live_members = [index for index in self.members if index not in self._lost_hosts]
        # After the loss of a leader, wait also for spares that have yet to call.
        if (
            not all(self._in_phase(index, "stopped") for index in live_members)
            or self._last_heard.keys() - self._states.keys()
        ):
            return
        cause = self._cause
        assert cause is not None
        usable = sorted(index for index, state in self._states.items() if not state["message"])
        may_restart = cause["reason"] not in ("user", "time_limit", "setup") and self.restarts_left > 0
        may_restart = may_restart and not self._nothing_started
        if may_restart and len(usable) >= self._required_hosts and self._has_quorum():
            if now < self._lost_end_at:
                return
            self.restarts_left -= 1
            self.attempt += 1
            # Spares have the highest indices, so most members keep their ranks.
            self.members = usable[: self._required_hosts]
            self._cause = None
            self._enter("queue", now)
            return
        if may_restart and not self._has_quorum():
            cause["message"] += f"; only {len(usable)} of the {len(self._hosts)} hosts are left here, too few to go on"
        elif may_restart:
            cause["message"] += f"; {len(usable)} hosts are left of the {self._required_hosts} that the job needs"
        self._finish(cause, now)

    # Checks in every stage.

    def _check_silence(self, now: float) -> None:
        for index, heard_at in list(self._last_heard.items()):
            if now - heard_at > self._heartbeat_s and index not in self._lost_hosts and index != self._index:
                del self._last_heard[index]
                self._states.pop(index, None)
                if self.do != "wait":  # nothing has started: it may come back
                    self._lost_hosts[index] = now - heard_at
                    self._await_end_of_lost(now)
        if self.do not in ("wait", "stop", "end") and (self._lost_members() or self._outvoted()):
            self._stop_for(self._loss(), now)

    def _await_end_of_lost(self, now: float) -> None:
        """Set the time when nothing runs on lost hosts: they detect the loss by the same limit, and kill their ranks.

        The last messages that two hosts have from each other may be two beats apart.
        """
        self._lost_end_at = now + 2 * self._heartbeat_s / BEATS + KILL_S

    def _check_ends(self, now: float) -> None:
        if any(state.get("cancel") for state in self._states.values()):
            cancelled = job_status("cancelled", "user", "cancelled")
            if self.do == "wait":
                self._finish(cancelled, now)
            elif self.do == "stop":
                self._cause = cancelled
            elif self.do != "end":
                self._stop_for(cancelled, now)
        for index in self.members:
            state = self._states.get(index)
            if state is not None and state["phase"] == "failed" and self.do in ("queue", "setup", "arm"):
                message = f"{self._name(index)}: {state['message']}"
                self._stop_for(job_status("failed", "setup", message, exit_code=state["code"]), now)

    # Helpers.

    def _take_over(self, last: Order, now: float) -> None:
        self.attempt, self.members = last["attempt"], last["members"] or list(range(self._required_hosts))
        self._nothing_started = last["do"] == "wait"  # the lost leader may still start the job on other hosts
        self.restarts_left = last["restarts_left"]
        self._former_leader = last["leader"]
        for index in last["lost"]:
            self._lost_hosts[index] = self._heartbeat_s
        self._lost_hosts[last["leader"]] = last["silent_s"]
        self._await_end_of_lost(now)
        for index in range(len(self._hosts)):
            if index not in self._lost_hosts:
                self._last_heard[index] = now  # they have a full heartbeat limit to call
        if last["status"] is not None:
            self.status, self.fenced = last["status"], last["status"]["fenced"]
            self._enter("end", now)
            return
        self._cause = last["cause"] or self._loss()
        self._enter("stop", now)

    def _enter(self, stage: str, now: float) -> None:
        self.do, self.since, self._first_failure = stage, now, None
        if stage != "queue":
            self._next_in_queue, self._waiting_for, self._release = None, "", []

    def _in_phase(self, index: int, phase: str) -> bool:
        state = self._states.get(index)
        return state is not None and state["phase"] == phase and state["attempt"] == self.attempt

    def _all(self, phase: str, this_attempt: bool = False) -> bool:
        return all(
            self._in_phase(index, phase) if this_attempt else self._states.get(index, {}).get("phase") == phase
            for index in self.members
        )

    def _stop_for(self, cause: dict[str, Any], now: float) -> None:
        self._cause = cause
        self._enter("stop", now)

    def _lost_members(self) -> list[int]:
        return [index for index in self.members if index in self._lost_hosts]

    def _loss(self) -> dict[str, Any]:
        lost = self._lost_members() or sorted(self._lost_hosts)
        message = ", ".join(f"{self._name(index)} was silent for {self._lost_hosts[index]:.1f} s" for index in lost)
        return job_status("failed", "node_failure", message)

    def _failure(self, failed: list[int]) -> dict[str, Any]:
        """Return the status of the first failure of the members, by the launchers' times."""
        states = [(index, self._states[index]) for index in failed]
        failures = [state["report"]["failure"] for _, state in states if state["report"]["failure"]]
        if failures:
            first = min(failures, key=lambda failure: float(failure["time"]) or float("inf"))
            status = job_status("failed", first["reason"], _failure_text(first), exit_code=first["exit_code"])
            status["failure"] = first
            return status
        index, state = min(states, key=lambda pair: (pair[1]["report"]["ended"], pair[0]))
        message = (
            _killed(state["code"]) or state["report"]["words"] or f"accel launch ended with exit code {state['code']}"
        )
        return job_status(
            "failed", state["report"]["refused"], f"{self._name(index)}: {message}", exit_code=state["code"]
        )

    def _has_quorum(self) -> bool:
        """Return True if no other part of the hosts can consider itself in charge."""
        present = len(self._states)
        has_former_leader = self._former_leader in self._states
        return 2 * present > len(self._hosts) or (2 * present == len(self._hosts) and has_former_leader)

    def _outvoted(self) -> bool:
        """Return True if the hosts silent here could restart the job without these, if they reach each other."""
        enough = len(self._lost_hosts) >= self._required_hosts and 2 * len(self._lost_hosts) > len(self._hosts)
        return enough and self.restarts_left > 0

    def _has_majority(self) -> bool:
        lost = self._lost_members()
        if self._nothing_started or self._outvoted():
            return False
        return not lost or (len(lost) < len(self.members) and self._has_quorum())

    def _finish(self, status: dict[str, Any], now: float) -> None:
        status["attempt"] = self.attempt
        self.status = status
        self.fenced = not self._has_majority()
        status["fenced"] = self.fenced
        warned = sorted((index, state["warning"]) for index, state in self._states.items() if state.get("warning"))
        messages = [status["message"], *(f"{self._name(index)}: {warning}" for index, warning in warned)]
        status["message"] = "; ".join(filter(None, messages))
        self._enter("end", now)

    def _name(self, index: int) -> str:
        return str(self._hosts[index]["name"])


def _killed(code: int) -> str:
    """Return a message if a signal killed the launcher: the last line of its log is then a rank's. Else ''."""
    return f"accel launch was killed by {signal.Signals(code - 128).name}" if code in (134, 137, 139) else ""


def _failure_text(failure: dict[str, Any]) -> str:
    subject = f"rank {failure['rank']}" if failure["rank"] is not None else f"the launcher on {failure['host']}"
    message = str(failure["message"] or failure["how"])
    text = message if message.startswith(subject) else f"{subject}: {message}"
    return f"{text} ({failure['cause']})" if failure["cause"] else text
