"""A job's supervisor on one host: it leads or follows the leading one, and carries out the leader's orders here."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time

from . import wire
from .documents import SCHEMA, AtomicJsonFile, job_status, log
from .leader import BEATS, Leader
from .runner import NodeRunner
from .slots import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    Settings = dict[str, Any]

TICK_S = 0.25
_ENDING_TICK_S = 0.05
LINGER_S = 2.0
MAX_UNVERIFIED_LINKS = 200  # links whose callers have yet to prove who they are
STATE_S = 5.0
STATE_RESERVED_BYTES, STATE_BYTES_PER_HOST = 1024, 32
RETRY_S = 1.0
WRITE_S = 60.0  # for so long, writing the result is retried
PHASES = {"stopping": "ending", "stopped": "ending", "done": "ending", "ready": "setup", "failed": "ending"}


class Supervisor:
    """One host's supervisor, from the first call to the leader to `exit.json`."""

    def __init__(
        self,
        settings: Settings,
        directory: str,
        secrets: dict[str, str],
        server: socket.socket | None,
        result: AtomicJsonFile,
    ) -> None:
        """Prepare the host's part. `server` accepts the other hosts' calls; None if there is no other host."""
        self._settings = settings
        self._directory = directory
        self._index = int(settings["node"])
        self._hosts = settings["nodes"] + settings["spares"]
        self._party = wire.Party(str(settings["job_id"]), str(settings["token"]).encode(), self._index)
        self._heartbeat_s = float(settings["heartbeat_s"])
        self._beat_s = self._heartbeat_s / BEATS
        self._work = NodeRunner(settings, directory, secrets)
        self._server = server
        self._calls = wire.Calls(server, self._party, MAX_UNVERIFIED_LINKS + len(self._hosts))
        self._result = result
        self._state = AtomicJsonFile(
            os.path.join(directory, "state.json"), STATE_RESERVED_BYTES + STATE_BYTES_PER_HOST * len(self._hosts)
        )
        self._boot = boot_id()
        self._last_turn_at = _awake()
        self._uplink: wire.Link | None = None
        self._began = time.monotonic()
        self._leader = 0
        self._lost_leaders: set[int] = set()
        self._leader_heard_at = self._began
        self._has_met_leader = False  # the current one
        self._leading: Leader | None = None
        self._order: dict[str, Any] | None = None
        self._sent: tuple[float, object] = (0.0, None)
        self._next_call = 0.0
        self._last_note: tuple[float, object] = (0.0, None)
        self._own_result: dict[str, Any] | None = None  # the result here if this host ends without a leader
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)  # a signal ignored here would be ignored in the ranks, too
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._index == 0:
            self._lead(self._began)

    def run(self) -> None:
        previous: object = None
        while not self._is_done():
            current = (self._work.state, self._order)
            self._poll_links(wait=current == previous)  # a change here may allow the next step here
            previous = current
            self._check_standstill()
            self._check_cancelled()
            if self._leading is None and self._own_result is None:
                self._follow(time.monotonic())
            self._work.tick()
            if self._leading is not None:
                self._lead_tick(self._leading, time.monotonic())
            self._finish()
            self._send_update(time.monotonic())
            self.note(time.monotonic())
        self.note(time.monotonic())

    # Receiving.

    def _poll_links(self, *, wait: bool) -> None:
        timeout_s = _ENDING_TICK_S if self._work.state["phase"] == "stopping" else min(TICK_S, self._beat_s / 2)
        poller = select.poll()  # select() takes no descriptors above 1023: too few for a thousand hosts
        poller.register(self._woken, select.POLLIN)
        if self._server is not None and time.monotonic() >= self._accept_paused_until:
            poller.register(self._server, select.POLLIN)
        links = {
            link.fileno(): link for link in [*self._calls.links, self._uplink] if link is not None and not link.closed
        }
        for number, link in links.items():
            poller.register(number, select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))
        for number, events in poller.poll(timeout_s * 1000 if wait else 0):
            if number in links:
                self._serve(links[number], events)
            elif number == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            elif not self._calls.accept():
                self._accept_paused_until = time.monotonic() + RETRY_S
        self._calls.drop_dead(time.monotonic(), self._heartbeat_s)

    def _serve(self, link: wire.Link, events: int) -> None:
        broken = events & ~(select.POLLIN | select.POLLOUT)
        if (events & select.POLLOUT or broken) and link.wants_to_write:
            link.flush()
        if (events & select.POLLIN or broken) and not link.closed:
            for message in link.receive():
                self._handle_message(link, message)

    def _handle_message(self, link: wire.Link, message: dict[str, Any]) -> None:
        assert link.peer is not None
        now = time.monotonic()
        if link is not self._uplink:
            if self._leading is None:
                link.send({"leader": self._leader if self._has_met_leader else None})
            else:
                self._leading.receive_state(link.peer, message, now)
                if not link.greeted:
                    link.greeted = True
                    for old_link in self._calls.links:  # its pending messages are outdated
                        if old_link is not link and old_link.peer == link.peer:
                            old_link.close()
                    link.send(self._leading.order())
        elif "do" in message:
            self._leader_heard_at, self._has_met_leader, self._order = now, True, message
            if self._index in message["lost"]:
                self._end_without_leader(f"{self._name(self._leader)} gave this host up as silent")
        elif message["leader"] not in (None, self._leader, *self._lost_leaders):
            self._switch_leader(int(message["leader"]), now)

    # Following.

    def _follow(self, now: float) -> None:
        self._call(now)
        if self._order is not None:
            self._work.apply_order(self._order)
        elif not self._lost_leaders:  # no leader was reached yet
            self._find_leader(now)
            return
        timeout_s = self._heartbeat_s if self._has_met_leader else max(1.0, self._heartbeat_s / 2)
        silent_s = now - self._leader_heard_at
        if silent_s <= timeout_s or self._work.state["phase"] == "ended":
            return
        if self._has_met_leader:
            self._leader_silent_s = silent_s
            # Fencing: the others may soon continue without this host.
            assert self._order is not None
            self._work.stop(int(self._order["attempt"]), within_s=0.0)
        self._lost_leaders.add(self._leader)
        self._switch_leader(min(set(range(len(self._hosts))) - self._lost_leaders), now)

    def _find_leader(self, now: float) -> None:
        """Search for the leader: the first host or, if that was lost before this one came, one that others know."""
        if now - self._began > self._settings["start_timeout_s"]:
            limit = self._settings["start_timeout_s"]
            self._end_without_leader(f"{self._name(0)} did not connect within {limit:g} s: the job did not start")
        elif now - self._leader_heard_at > max(0.5, 2 * self._beat_s):
            self._searches += 1
            others = [index for index in range(1, len(self._hosts)) if index != self._index]
            self._switch_leader(others[self._searches // 2 % len(others)] if self._searches % 2 and others else 0, now)

    def _switch_leader(self, leader: int, now: float) -> None:
        self._drop_uplink()
        self._leader, self._leader_heard_at, self._has_met_leader, self._next_call = leader, now, False, 0.0
        if leader == self._index:
            self._lead(now)

    def _lead(self, now: float) -> None:
        last = None
        if self._order is not None:
            last = {
                **self._order,
                "silent_s": self._leader_silent_s,
                "lost": sorted({*self._order["lost"], *self._lost_leaders}),
            }
        self._leader, self._has_met_leader = self._index, True
        self._leading = Leader(self._settings, self._index, now, last)

    def _call(self, now: float) -> None:
        link = self._uplink
        if link is not None and now - link.last_byte_at > self._heartbeat_s / 2:
            link.close()  # packets may be lost one way only, or TCP be slow to notice
        if (link is None or link.closed) and now >= self._next_call:
            self._next_call = now + min(1.0, self._beat_s)
            host = self._hosts[self._leader]
            self._uplink = wire.call(host["address"], host["control_port"], self._party, self._leader)
            if self._uplink is not None:
                self._uplink.send(self._work.state)

    def _drop_uplink(self) -> None:
        if self._uplink is not None:
            self._uplink.close()
            self._uplink = None

    # Leading.

    def _lead_tick(self, leader: Leader, now: float) -> None:
        leader.receive_state(self._index, self._work.state, now)
        if leader.step(now) or (leader.do == "end" and now - leader.since > self._heartbeat_s):
            self._all_have_result = True
        self._order = leader.order()
        self._work.apply_order(self._order)

    # Ending.

    _accept_paused_until = 0.0
    _end_requested = False
    _all_have_result = False
    _searches = 0
    _write_next = 0.0
    _write_until: float | None = None
    _written_at: float | None = None
    _leader_silent_s = 0.0

    def _on_sigterm(self, *_: object) -> None:
        self._end_requested = True

    def _check_standstill(self) -> None:
        """Step down after SIGTERM, or after more than a heartbeat without a turn: the others have given this host up.

        It must then neither lead them nor run ranks next to theirs, regardless of older messages that still arrive.
        """
        stood_s, self._last_turn_at = _awake() - self._last_turn_at, _awake()
        if self._end_requested:
            alone = len(self._hosts) == 1
            message = f"{self._name(self._index)}: the supervisor received SIGTERM"
            self._step_down(message, within_s=math.inf if alone else self._heartbeat_s)
        elif stood_s > self._heartbeat_s and len(self._hosts) > 1 and (self._order or {}).get("do", "wait") != "wait":
            self._step_down(f"{self._name(self._index)}: the supervisor stood still for {stood_s:.1f} s")

    def _step_down(self, message: str, within_s: float = 0.0) -> None:
        if (self._order or {}).get("status") is None and self._own_result is None:
            self._leading, self._has_met_leader = None, False
            self._drop_uplink()
            self._end_without_leader(message, within_s=within_s)

    def _check_cancelled(self) -> None:
        if self._work.state["cancel"] or not os.path.exists(os.path.join(self._directory, "cancel")):
            return
        self._work.state = {**self._work.state, "cancel": True}
        if self._leading is None and not self._has_met_leader and not self._lost_leaders:
            self._end_without_leader("cancelled before it started", state="cancelled", reason="user")

    def _end_without_leader(
        self, message: str, *, state: str = "failed", reason: str = "node_failure", within_s: float = 0.0
    ) -> None:
        if self._own_result is None:
            attempt = int(self._work.state["attempt"])
            self._own_result = job_status(state, reason, message, attempt=attempt, fenced=True)
            self._work.stop(attempt, within_s)

    def _finish(self) -> None:
        status = self._own_result or (self._order or {}).get("status")
        now = time.monotonic()
        if status is None or not self._work.stopped or self._written_at is not None or now < self._write_next:
            return
        status = {**status, "observed_at": time.time(), "schema": SCHEMA, "node": self._index}
        self._write_until = self._write_until or now + WRITE_S
        try:
            self._result.write_once(status)
        except OSError as error:  # the other hosts have the result, and may wait for this one's beat
            log(f"{self._result.path}: {error.strerror}")
            if now < self._write_until:
                self._write_next = now + RETRY_S
                return
        self._written_at = now
        self._work.release()
        self._work.state = {**self._work.state, "phase": "ended"}

    def _is_done(self) -> bool:
        if self._written_at is None:
            return False
        if self._leading is not None:
            return self._all_have_result
        unsent = self._uplink is not None and not self._uplink.closed
        return not unsent or time.monotonic() - self._written_at > LINGER_S

    # Sending and recording.

    def _send_update(self, now: float) -> None:
        message: Any = self._order if self._leading is not None else self._work.state
        if message == self._sent[1] and now - self._sent[0] < self._beat_s:
            return
        self._sent = (now, message)
        if self._leading is not None:
            for link in self._calls.links:
                link.send(message)
        elif self._uplink is not None and not self._uplink.closed:
            self._uplink.send(message)

    def note(self, now: float) -> None:
        """Write state.json if something has changed or the last one is old."""
        phase, order = self._work.state["phase"], self._order or {}
        attempt = order.get("attempt", 0)
        message = self._message(phase)
        summary = (phase, attempt, self._leader, order.get("do"), message)
        if summary == self._last_note[1] and now - self._last_note[0] < min(STATE_S, 2 * self._beat_s):
            return
        if self._last_note[1] is None or summary[0] != self._last_note[1][0]:  # type: ignore[index]
            self._since = time.time()
        self._last_note = (now, summary)
        is_member = self._index in order.get("members", [])
        ages = self._leading.ages(now) if self._leading else {str(self._leader): round(now - self._leader_heard_at, 3)}
        state = {
            "schema": SCHEMA,
            "phase": PHASES.get(phase, phase),
            "attempt": attempt,
            "rank": self._work.rank if is_member else None,
            "members": order.get("members", []),
            "since": self._since,
            "heard": ages,
            "message": message,
            "queued": order.get("do") == "queue",
            "leader": self._leader,
            "pid": os.getpid(),
            "boot": self._boot,
            "written": time.time(),
        }
        with contextlib.suppress(OSError):  # a full disk must not end a training run
            self._state.write(state)

    _since = 0.0

    def _message(self, phase: str) -> str:
        if (self._order or {}).get("do") == "queue":
            return str(self._order["waits"])  # type: ignore[index]
        if phase == "waiting" and self._leading is not None:
            ages = self._leading.ages(time.monotonic())
            missing = [host["name"] for index, host in enumerate(self._hosts) if str(index) not in ages]
            return f"waits for {', '.join(missing)}" if missing else ""
        if phase == "waiting":
            return f"waits for {self._name(self._leader)}"
        return str(self._work.state["message"])

    def _name(self, index: int) -> str:
        return str(self._hosts[index]["name"])


def _awake() -> float:
    """Return the time of a clock that continues while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
