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

_MAX_SESSIONS = 8  # OpenSSH's servers allow 10 by default
_REFUSALS = 20
_SESSION_WAIT_S = 60.0
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts in seconds. ConnectTimeout and ServerAlive… in ~/.ssh/config take precedence.

    connect_s:   for reaching the host, and again for the handshake and the login.
    alive_s:     silence after which a keep-alive request is sent.
    alive_count: number of such silent intervals after which the connection is given up.
    """

    connect_s: float = 10.0
    alive_s: float = 5.0
    alive_count: int = 3


class Connection:
    """A logged-in connection. Any number of commands may run over it; they share the server's sessions."""

    def __init__(self, settings: Settings, ssh: fabric.Connection, timeouts: Timeouts):
        self.settings = settings
        self.ssh = ssh
        self.transport: paramiko.Transport = ssh.transport
        self.round_trip_s = 0.0
        self._packets: Any = self.transport.packetizer
        self._alive_s = settings.alive_interval_s or timeouts.alive_s
        self._alive_count = settings.alive_count if settings.alive_interval_s else timeouts.alive_count
        self._failure: str | None = None
        self._sessions = threading.Condition()
        self._open = 0
        self._limit = _MAX_SESSIONS
        self._enable_keepalive()

    @property
    def alive(self) -> bool:
        return self._failure is None and self.transport.is_active()

    @property
    def silence_s(self) -> float:
        """The seconds that a host may be silent before it is given up."""
        return self._alive_s * self._alive_count

    def connection_lost_error(self, activity: str) -> HostUnreachable:
        """Return the error for a lost connection."""
        reason = self._failure
        if reason is None:
            error = self.transport.get_exception()
            reason = "the connection was closed" if error is None or isinstance(error, EOFError) else str(error)
        return HostUnreachable(self.settings.alias, f"lost while {activity}: {one_line(reason)}")

    def check_silence(self, now: float) -> None:
        """Close the connection, and so end everything that waits on it, if the host was silent for too long."""
        silent_s = now - self._packets.last_packet_at
        if self.alive and silent_s > self.silence_s:
            self._failure = f"no answer for {silent_s:.0f} s"
            self.close()

    def reset_silence(self) -> None:
        """Restart the count of silence, after this process itself was stopped."""
        self._packets.last_packet_at = time.monotonic()

    def open_session(self, timeout_s: float) -> paramiko.Channel:
        """Open a session as soon as the server has a free one. Call `release_session` after its use."""
        import paramiko

        deadline = time.monotonic() + _SESSION_WAIT_S
        refusals = 0
        while refusals < _REFUSALS:
            self._acquire_session(deadline)
            started_at = time.monotonic()
            try:
                channel = self.transport.open_session(timeout=timeout_s)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not self.alive or time.monotonic() - started_at >= timeout_s:
                    self.release_session()
                    raise self.connection_lost_error(f"opening a session ({one_line(str(error))})") from None
                # When several are refused at once, paramiko gives the reason to only one of the threads.
                refusals += self._session_refused()
                continue
            elapsed = time.monotonic() - started_at
            self.round_trip_s = min(self.round_trip_s or elapsed, elapsed)
            return channel
        raise HostUnreachable(self.settings.alias, "the server opens no session (MaxSessions in its sshd_config?)")

    def release_session(self) -> None:
        with self._sessions:
            self._open -= 1
            self._sessions.notify()

    def close(self) -> None:
        self.transport.close()

    def _acquire_session(self, deadline: float) -> None:
        with self._sessions:
            free = self._sessions.wait_for(
                lambda: self._open < self._limit or not self.alive, max(0.0, deadline - time.monotonic())
            )
            if not self.alive:
                raise self.connection_lost_error("a command was started")
            if not free:
                raise HostUnreachable(self.settings.alias, f"all {self._limit} sessions of its server are in use")
            self._open += 1

    def _session_refused(self) -> bool:
        """Lower the limit: the server has fewer sessions, or has yet to notice an end. Return True if none is open."""
        with self._sessions:
            self._open -= 1
            none_open = self._open == 0
            self._limit = max(1, min(self._limit, self._open))
            self._sessions.wait(_PAUSE_S)
            return none_open

    def _enable_keepalive(self) -> None:
        """Send keep-alives that request a reply, as paramiko's own do not, so that a live host is never silent."""
        from paramiko.common import cMSG_GLOBAL_REQUEST
        from paramiko.message import Message

        transport: Any = self.transport

        def send_keepalive() -> None:
            request = Message()
            request.add_byte(cMSG_GLOBAL_REQUEST)
            request.add_string("keepalive@openssh.com")
            request.add_boolean(True)
            transport._send_user_message(request)

        self._packets.set_keepalive(self._alive_s, send_keepalive)


def library() -> None:
    """Raise SchedulerError, with the command that installs it, if fabric is missing."""
    try:
        import fabric  # noqa: F401
    except ImportError:
        raise SchedulerError("SSH needs fabric, which is not installed: pip install 'accel-launch[ssh]'") from None
    import logging

    # Every problem is raised; without a handler Python would also print them, with tracebacks.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
