"""A logged-in SSH connection, which shares its sessions among commands and detects a silent host."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SchedulerError
from .errors import HostUnreachable, one_line
from .ssh_config import Settings

if TYPE_CHECKING:
    import fabric
    import paramiko

_MOST_SESSIONS = 8  # OpenSSH's servers allow 10 unless told otherwise
_REFUSALS = 20
_TURN_S = 60.0
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Timeouts in seconds. ConnectTimeout and ServerAlive… in ~/.ssh/config take precedence.

    connect_s:   for the way to the host, and again for the handshake and the login.
    alive_s:     silence after which a keep-alive request is sent.
    alive_count: number of such silent intervals after which the connection is given up.
    """

    connect_s: float = 10.0
    alive_s: float = 5.0
    alive_count: int = 3


class Connection:
    """A logged-in connection. Any number of commands may run over it; they share the server's sessions."""

    def __init__(self, settings: Settings, ssh: fabric.Connection, patience: Patience):
        self.settings = settings
        self.ssh = ssh
        self.transport: paramiko.Transport = ssh.transport
        self.round_trip_s = 0.0
        self._packets: Any = self.transport.packetizer
        self._alive_s = settings.alive_interval_s or patience.alive_s
        self._alive_count = settings.alive_count if settings.alive_interval_s else patience.alive_count
        self._lost: str | None = None
        self._sessions = threading.Condition()
        self._open = 0
        self._limit = _MOST_SESSIONS
        self._ask_for_signs_of_life()

    @property
    def alive(self) -> bool:
        return self._lost is None and self.transport.is_active()

    @property
    def silence_s(self) -> float:
        """The seconds that a host may be silent before it is given up."""
        return self._alive_s * self._alive_count

    def lost(self, doing: str) -> HostUnreachable:
        """Return the error for a lost connection."""
        reason = self._lost
        if reason is None:
            error = self.transport.get_exception()
            reason = "the connection was closed" if error is None or isinstance(error, EOFError) else str(error)
        return HostUnreachable(self.settings.alias, f"lost while {doing}: {one_line(reason)}")

    def check_silence(self, now: float) -> None:
        """Close the connection, and so end everything that waits on it, if the host was silent for too long."""
        silent = now - self._packets.heard
        if self.alive and silent > self.silence_s:
            self._lost = f"no answer for {silent:.0f} s"
            self.close()

    def heard_now(self) -> None:
        """Restart the count of silence, after this process itself was stopped."""
        self._packets.heard = time.monotonic()

    def open_session(self, timeout_s: float) -> paramiko.Channel:
        """Open a session as soon as the server has a free one. Call `release_session` after its use."""
        import paramiko

        give_up = time.monotonic() + _TURN_S
        refused = 0
        while refused < _REFUSALS:
            self._take_turn(give_up)
            began = time.monotonic()
            try:
                channel = self.transport.open_session(timeout=timeout_s)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not self.alive or time.monotonic() - began >= timeout_s:
                    self.release_session()
                    raise self.lost(f"opening a session ({one_line(str(error))})") from None
                # When several are refused at once, paramiko gives the reason to only one of the threads.
                refused += self._refused_turn()
                continue
            taken = time.monotonic() - began
            self.round_trip_s = min(self.round_trip_s or taken, taken)
            return channel
        raise HostUnreachable(self.settings.alias, "the server opens no session (MaxSessions in its sshd_config?)")

    def release_session(self) -> None:
        with self._sessions:
            self._open -= 1
            self._sessions.notify()

    def close(self) -> None:
        self.transport.close()

    def _take_turn(self, deadline: float) -> None:
        with self._sessions:
            free = self._sessions.wait_for(
                lambda: self._open < self._limit or not self.alive, max(0.0, deadline - time.monotonic())
            )
            if not self.alive:
                raise self.lost("a command was started")
            if not free:
                raise HostUnreachable(self.settings.alias, f"all {self._limit} sessions of its server are in use")
            self._open += 1

    def _refused_turn(self) -> bool:
        """Lower the limit: the server has fewer sessions, or has yet to notice an end. Return True if none is open."""
        with self._sessions:
            self._open -= 1
            alone = self._open == 0
            self._limit = max(1, min(self._limit, self._open))
            self._sessions.wait(_PAUSE_S)
            return alone

    def _ask_for_signs_of_life(self) -> None:
        """Send keep-alives that request a reply, as paramiko's own do not, so that a live host is never silent."""
        from paramiko.common import cMSG_GLOBAL_REQUEST
        from paramiko.message import Message

        transport: Any = self.transport

        def ask() -> None:
            request = Message()
            request.add_byte(cMSG_GLOBAL_REQUEST)
            request.add_string("keepalive@openssh.com")
            request.add_boolean(True)
            transport._send_user_message(request)

        self._packets.set_keepalive(self._alive_s, ask)


def library() -> None:
    """Raise SchedulerError, with the command that installs it, if fabric is missing."""
    try:
        import fabric  # noqa: F401
    except ImportError:
        raise SchedulerError("SSH needs fabric, which is not installed: pip install 'accel-launch[ssh]'") from None
    import logging

    # Every problem is raised; without a handler Python would also print them, with tracebacks.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
