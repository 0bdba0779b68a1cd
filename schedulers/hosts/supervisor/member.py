"""A job's supervisor on one host: it follows the leading one, or leads, and does here what the leader asks for."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time

from . import wire
from .documents import SCHEMA, Document, say
from .leader import BEATS, Leader
from .runner import Work
from .slots import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    Settings = dict[str, Any]

TICK_S = 0.25
_ENDING_TICK_S = 0.05
LINGER_S = 2.0
MOST_STRANGERS = 200  # that call and have yet to prove who they are
STATE_S = 5.0
STATE_ROOM, HOST_ROOM = 1024, 32
RETRY_S = 1.0
WRITE_S = 60.0  # so long it is tried to write how the job ended
PHASES = {"stopping": "ending", "stopped": "ending", "done": "ending", "ready": "setup", "failed": "ending"}


class Supervisor:
    """One host's supervisor, from the first call to the leader to `exit.json`."""

    def __init__(
        self,
        settings: Settings,
        directory: str,
        secrets: dict[str, str],
        server: socket.socket | None,
        result: Document,
    ) -> None:
        """`server` takes the other hosts' calls; None where there is no other."""
        self._settings = settings
        self._directory = directory
        self._own = int(settings["node"])
        self._hosts = settings["nodes"] + settings["spares"]
        self._party = wire.Party(str(settings["job_id"]), str(settings["token"]).encode(), self._own)
        self._heartbeat_s = float(settings["heartbeat_s"])
        self._beat_s = self._heartbeat_s / BEATS
        self._work = Work(settings, directory, secrets)
        self._server = server
        self._calls = wire.Calls(server, self._party, MOST_STRANGERS + len(self._hosts))
        self._result = result
        self._state = Document(os.path.join(directory, "state.json"), STATE_ROOM + HOST_ROOM * len(self._hosts))
        self._boot = boot_id()
        self._turned = _awake()
        self._uplink: wire.Link | None = None
        self._began = time.monotonic()
        self._leader = 0
        self._given_up: set[int] = set()
        self._heard = self._began  # of the leader
        self._met = False  # the leader, since it is that
        self._leading: Leader | None = None
        self._order: dict[str, Any] | None = None
        self._sent: tuple[float, object] = (0.0, None)
        self._next_call = 0.0
        self._noted: tuple[float, object] = (0.0, None)
        self._alone: dict[str, Any] | None = None  # how it ends when there is nobody to ask
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)  # what is ignored would be so in the ranks too
        signal.signal(signal.SIGTERM, self._on_end)
        if self._own == 0:
            self._lead(self._began)

    def run(self) -> None:
        before: object = None
        while not self._ended():
            stands = (self._work.state, self._order)
            self._listen(wait=stands == before)  # what has just been done here may have consequences here
            before = stands
            self._look_for_standstill()
            self._look_for_cancel()
            if self._leading is None and self._alone is None:
                self._follow(time.monotonic())
            self._work.tick()
            if self._leading is not None:
                self._direct(self._leading, time.monotonic())
            self._finish()
            self._tell(time.monotonic())
            self.note(time.monotonic())
        self.note(time.monotonic())

    # Hearing.

    def _listen(self, *, wait: bool) -> None:
        patience = _ENDING_TICK_S if self._work.state["phase"] == "stopping" else min(TICK_S, self._beat_s / 2)
        poller = select.poll()  # no select(): a thousand hosts have higher numbers than it takes
        poller.register(self._woken, select.POLLIN)
        if self._server is not None and time.monotonic() >= self._deaf_until:
            poller.register(self._server, select.POLLIN)
        links = {
            link.fileno(): link for link in [*self._calls.links, self._uplink] if link is not None and not link.closed
        }
        for number, link in links.items():
            poller.register(number, select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))
        for number, events in poller.poll(patience * 1000 if wait else 0):
            if number in links:
                self._serve(links[number], events)
            elif number == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            elif not self._calls.accept():
                self._deaf_until = time.monotonic() + RETRY_S
        self._calls.drop_dead(time.monotonic(), self._heartbeat_s)

    def _serve(self, link: wire.Link, events: int) -> None:
        broken = events & ~(select.POLLIN | select.POLLOUT)
        if (events & select.POLLOUT or broken) and link.wants_to_write:
            link.flush()
        if (events & select.POLLIN or broken) and not link.closed:
            for message in link.receive():
                self._take(link, message)

    def _take(self, link: wire.Link, message: dict[str, Any]) -> None:
        assert link.peer is not None
        now = time.monotonic()
        if link is not self._uplink:
            if self._leading is None:
                link.send({"leader": self._leader if self._met else None})
            else:
                self._leading.hear(link.peer, message, now)
                if not link.greeted:
                    link.greeted = True
                    for former in self._calls.links:  # what is still on its way there is old
                        if former is not link and former.peer == link.peer:
                            former.close()
                    link.send(self._leading.order())
        elif "do" in message:
            self._heard, self._met, self._order = now, True, message
            if self._own in message["lost"]:
                self._end_alone(f"{self._name(self._leader)} gave this host up as silent")
        elif message["leader"] not in (None, self._leader, *self._given_up):
            self._turn_to(int(message["leader"]), now)

    # Following.

    def _follow(self, now: float) -> None:
        self._call(now)
        if self._order is not None:
            self._work.obey(self._order)
        elif not self._given_up:  # nobody has been met yet
            self._seek(now)
            return
        patience = self._heartbeat_s if self._met else max(1.0, self._heartbeat_s / 2)
        silent = now - self._heard
        if silent <= patience or self._work.state["phase"] == "ended":
            return
        if self._met:
            self._lost_s = silent
            # Fencing: the others may soon go on without this host.
            assert self._order is not None
            self._work.stop(int(self._order["attempt"]), within_s=0.0)
        self._given_up.add(self._leader)
        self._turn_to(min(set(range(len(self._hosts))) - self._given_up), now)

    def _seek(self, now: float) -> None:
        """Until a leader is met: the first host leads, unless it was lost before this one came; another knows then."""
        if now - self._began > self._settings["start_timeout_s"]:
            limit = self._settings["start_timeout_s"]
            self._end_alone(f"{self._name(0)} did not come within {limit:g} s: the job did not start")
        elif now - self._heard > max(0.5, 2 * self._beat_s):
            self._sought += 1
            others = [index for index in range(1, len(self._hosts)) if index != self._own]
            self._turn_to(others[self._sought // 2 % len(others)] if self._sought % 2 and others else 0, now)

    def _turn_to(self, leader: int, now: float) -> None:
        self._drop_uplink()
        self._leader, self._heard, self._met, self._next_call = leader, now, False, 0.0
        if leader == self._own:
            self._lead(now)

    def _lead(self, now: float) -> None:
        last = None
        if self._order is not None:
            last = {**self._order, "silent_s": self._lost_s, "lost": sorted({*self._order["lost"], *self._given_up})}
        self._leader, self._met = self._own, True
        self._leading = Leader(self._settings, self._own, now, last)

    def _call(self, now: float) -> None:
        link = self._uplink
        if link is not None and now - link.heard > self._heartbeat_s / 2:
            link.close()  # packets may vanish on this way only, or the way back be long to be found by TCP
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

    def _direct(self, leader: Leader, now: float) -> None:
        leader.hear(self._own, self._work.state, now)
        if leader.step(now) or (leader.do == "end" and now - leader.since > self._heartbeat_s):
            self._all_know = True
        self._order = leader.order()
        self._work.obey(self._order)

    # Ending.

    _deaf_until = 0.0
    _told_to_end = False
    _all_know = False
    _sought = 0
    _write_next = 0.0
    _write_until: float | None = None
    _written_at: float | None = None
    _lost_s = 0.0

    def _on_end(self, *_: object) -> None:
        self._told_to_end = True

    def _look_for_standstill(self) -> None:
        """After more than a heartbeat without a turn the others have given this host up, whatever it still hears of
        what they said before: it must not lead them, nor run its ranks beside theirs."""
        stood_s, self._turned = _awake() - self._turned, _awake()
        if self._told_to_end:
            alone = len(self._hosts) == 1
            message = f"{self._name(self._own)}: the supervisor was told to end (SIGTERM)"
            self._resign(message, within_s=math.inf if alone else self._heartbeat_s)
        elif stood_s > self._heartbeat_s and len(self._hosts) > 1 and (self._order or {}).get("do", "wait") != "wait":
            self._resign(f"{self._name(self._own)}: the supervisor stood still for {stood_s:.1f} s")

    def _resign(self, message: str, within_s: float = 0.0) -> None:
        if (self._order or {}).get("status") is None and self._alone is None:
            self._leading, self._met = None, False
            self._drop_uplink()
            self._end_alone(message, within_s=within_s)

    def _look_for_cancel(self) -> None:
        if self._work.state["cancel"] or not os.path.exists(os.path.join(self._directory, "cancel")):
            return
        self._work.state = {**self._work.state, "cancel": True}
        if self._leading is None and not self._met and not self._given_up:
            self._end_alone("cancelled before it started", state="cancelled", reason="user")

    def _end_alone(
        self, message: str, *, state: str = "failed", reason: str = "node_failure", within_s: float = 0.0
    ) -> None:
        if self._alone is None:
            attempt = int(self._work.state["attempt"])
            self._alone = {"state": state, "reason": reason, "exit_code": None, "attempt": attempt, "message": message,
                           "native_state": "", "failure": None, "fenced": True}  # fmt: skip
            self._work.stop(attempt, within_s)

    def _finish(self) -> None:
        status = self._alone or (self._order or {}).get("status")
        now = time.monotonic()
        if status is None or not self._work.stopped or self._written_at is not None or now < self._write_next:
            return
        status = {**status, "observed_at": time.time(), "schema": SCHEMA, "node": self._own}
        self._write_until = self._write_until or now + WRITE_S
        try:
            self._result.write_once(status)
        except OSError as error:  # the other hosts have it, and may wait for this one's beat
            say(f"{self._result.path}: {error.strerror}")
            if now < self._write_until:
                self._write_next = now + RETRY_S
                return
        self._written_at = now
        self._work.release()
        self._work.state = {**self._work.state, "phase": "ended"}

    def _ended(self) -> bool:
        if self._written_at is None:
            return False
        if self._leading is not None:
            return self._all_know
        unsent = self._uplink is not None and not self._uplink.closed
        return not unsent or time.monotonic() - self._written_at > LINGER_S

    # Telling.

    def _tell(self, now: float) -> None:
        told: Any = self._order if self._leading is not None else self._work.state
        if told == self._sent[1] and now - self._sent[0] < self._beat_s:
            return
        self._sent = (now, told)
        if self._leading is not None:
            for link in self._calls.links:
                link.send(told)
        elif self._uplink is not None and not self._uplink.closed:
            self._uplink.send(told)

    def note(self, now: float) -> None:
        """Writes state.json, when there is something new to say or the last one has become old."""
        phase, order = self._work.state["phase"], self._order or {}
        attempt = order.get("attempt", 0)
        message = self._message(phase)
        shown = (phase, attempt, self._leader, order.get("do"), message)
        if shown == self._noted[1] and now - self._noted[0] < min(STATE_S, 2 * self._beat_s):
            return
        if self._noted[1] is None or shown[0] != self._noted[1][0]:  # type: ignore[index]
            self._since = time.time()
        self._noted = (now, shown)
        mine = self._own in order.get("members", [])
        heard = self._leading.ages(now) if self._leading else {str(self._leader): round(now - self._heard, 3)}
        state = {
            "schema": SCHEMA,
            "phase": PHASES.get(phase, phase),
            "attempt": attempt,
            "rank": self._work.rank if mine else None,
            "members": order.get("members", []),
            "since": self._since,
            "heard": heard,
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
            heard = self._leading.ages(time.monotonic())
            missing = [host["name"] for index, host in enumerate(self._hosts) if str(index) not in heard]
            return f"waits for {', '.join(missing)}" if missing else ""
        if phase == "waiting":
            return f"waits for {self._name(self._leader)}"
        return str(self._work.state["message"])

    def _name(self, index: int) -> str:
        return str(self._hosts[index]["name"])


def _awake() -> float:
    """A clock that goes on while the machine sleeps, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
