"""From settings to a connection that is logged in: the way there, the host's key, and who notices when it goes dead."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SchedulerError
from . import known_hosts, revoked_keys
from .errors import HostKeyRefused, HostUnreachable, one_line
from .known_hosts import KnownKey, Verdict
from .login import Keys, log_in
from .sockets import HeardStream, by_proxy, by_socket
from .ssh_config import Settings

if TYPE_CHECKING:
    import paramiko

_RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")
_MOST_SESSIONS = 8  # OpenSSH's servers allow 10 unless told otherwise
_REFUSALS = 20
_TURN_S = 60.0
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, in seconds; what ~/.ssh/config says of ConnectTimeout and ServerAlive… comes first.

    connect_s: for the way to the host, and again for the handshake and the log-in.
    alive_s:   after how long without a sound a host is asked for one.
    alive_count: how many such times it may stay silent before the connection is given up.
    """

    connect_s: float = 10.0
    alive_s: float = 5.0
    alive_count: int = 3


class KnownHosts:
    """The files of known keys, each read once until it changes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, tuple[object, list[KnownKey]]] = {}

    def keys(self, files: Sequence[str]) -> list[KnownKey]:
        return [key for file in files for key in self._keys(file)]

    def _keys(self, file: str) -> list[KnownKey]:
        with self._lock:
            try:
                stat = os.stat(file)
                state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if file not in self._read or self._read[file][0] != state:
                    with open(file, encoding="utf-8", errors="surrogateescape") as opened:
                        self._read[file] = (state, known_hosts.read(opened.read(), file))
            except OSError:
                return []
            return self._read[file][1]


class Connection:
    """A connection that is logged in. Any number of commands may run over it; they share out the server's sessions."""

    def __init__(self, settings: Settings, transport: paramiko.Transport, stream: HeardStream, patience: Patience):
        self.settings = settings
        self.transport = transport
        self.round_trip_s = 0.0
        self._stream = stream
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
        """How long a host may be silent before it is given up."""
        return self._alive_s * self._alive_count

    def lost(self, doing: str) -> HostUnreachable:
        """The error for a connection that is gone."""
        reason = self._lost
        if reason is None:
            error = self.transport.get_exception()
            reason = "the connection was closed" if error is None or isinstance(error, EOFError) else str(error)
        return HostUnreachable(self.settings.alias, f"lost while {doing}: {one_line(reason)}")

    def check_silence(self, now: float) -> None:
        """Ends the connection, and so everything that waits on it, when nothing was heard for too long."""
        silent = now - self._stream.heard
        if self.alive and silent > self.silence_s:
            self._lost = f"no answer for {silent:.0f} s"
            self.close()

    def heard_now(self) -> None:
        """Starts the count again: this process itself was stopped, and cannot know."""
        self._stream.heard = time.monotonic()

    def open_session(self, timeout_s: float) -> paramiko.Channel:
        """A new session, as soon as the server has one to give. `release_session` gives it back."""
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

    def open_way(self, hostname: str, port: int, timeout_s: float) -> paramiko.Channel:
        """A stream from this host on to another one. Raises HostUnreachable."""
        import paramiko

        try:
            return self.transport.open_channel("direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=timeout_s)
        except paramiko.ChannelException as error:
            said = {1: "forbids it (AllowTcpForwarding)", 2: "cannot connect to it"}.get(error.code, error.text)
            raise HostUnreachable(self.settings.alias, f"as a jump host to {hostname}:{port}: it {said}") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            said = one_line(str(error))
            raise HostUnreachable(self.settings.alias, f"as a jump host to {hostname}:{port}: {said}") from None

    def close(self) -> None:
        self.transport.close()
        self._stream.close()

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
        """The server has fewer sessions than was thought, or has yet to notice an end. True when it gave none."""
        with self._sessions:
            self._open -= 1
            alone = self._open == 0
            self._limit = max(1, min(self._limit, self._open))
            self._sessions.wait(_PAUSE_S)
            return alone

    def _ask_for_signs_of_life(self) -> None:
        """paramiko's own keep-alive does not ask for an answer; this one does, so a live host is never silent."""
        from paramiko.common import cMSG_GLOBAL_REQUEST
        from paramiko.message import Message

        transport: Any = self.transport

        def ask() -> None:
            request = Message()
            request.add_byte(cMSG_GLOBAL_REQUEST)
            request.add_string("keepalive@openssh.com")
            request.add_boolean(True)
            transport._send_user_message(request)

        transport.packetizer.set_keepalive(self._alive_s, ask)


def connect(
    settings: Settings, *, via: Connection | None, known: KnownHosts, keys: Keys, patience: Patience
) -> Connection:
    """A connection to the host, logged in, its key verified. Raises HostUnreachable and what derives from it."""
    import paramiko

    stream = _reach(settings, via, patience)
    try:
        transport = paramiko.Transport(stream)  # type: ignore[arg-type]  # all that it calls is there
    except BaseException:
        stream.close()
        raise
    try:
        seconds = settings.connect_timeout_s or patience.connect_s
        _shake_hands(transport, stream, settings, known, seconds)
        transport.auth_timeout = seconds
        log_in(transport, settings, keys)
        return Connection(settings, transport, stream, patience)
    except BaseException:
        transport.close()
        _end_timer(transport)
        stream.close()
        raise


def _shake_hands(
    transport: paramiko.Transport, stream: HeardStream, settings: Settings, known: KnownHosts, seconds: float
) -> None:
    import paramiko

    names = known_hosts.looked_up_as(settings.hostname, settings.port, settings.key_alias)
    entries = known.keys(settings.known_hosts)
    transport.banner_timeout = transport.handshake_timeout = seconds
    options = transport.get_security_options()
    wanted = [name for type in known_hosts.known_types(entries, names) for name in _algorithms(type)]
    offered = list(options.key_types)
    options.key_types = [name for name in wanted if name in offered] + [name for name in offered if name not in wanted]
    try:
        transport.start_client(timeout=seconds)
        key = transport.get_remote_server_key()
    except (paramiko.SSHException, EOFError, OSError) as error:
        said = stream.explanation() or (one_line(str(error)) if str(error) else "the connection was closed")
        raise HostUnreachable(
            settings.alias, f"{settings.endpoint} answers, but the SSH handshake fails: {said}"
        ) from None
    finally:
        _end_timer(transport)
    _check_key(settings, entries, names, key.get_name(), key.get_base64())


def _end_timer(transport: paramiko.Transport) -> None:
    """paramiko's timer for handshakes would keep a program that is done waiting."""
    with contextlib.suppress(AttributeError):
        transport.packetizer.complete_handshake()


def _algorithms(key_type: str) -> tuple[str, ...]:
    return _RSA_ALGORITHMS if key_type == "ssh-rsa" else (key_type,)


def _check_key(settings: Settings, known: list[KnownKey], names: list[str], key_type: str, key: str) -> None:
    verdict, lines = known_hosts.judge(known, names, key_type, key)
    mark = f"{key_type} {known_hosts.fingerprint(key)}"
    problem = revoked_keys.problem(settings.revoked, key_type, key) if settings.revoked else None
    if problem is not None:
        raise HostKeyRefused(settings.alias, f"its host key, {mark}, {problem}")
    if verdict is Verdict.KNOWN:
        return
    where = ", ".join(line.where for line in lines)
    if verdict is Verdict.REVOKED:
        raise HostKeyRefused(settings.alias, f"its host key, {mark}, is revoked ({where})")
    file = settings.known_hosts[0] if settings.known_hosts else os.path.expanduser("~/.ssh/known_hosts")
    directory = os.path.dirname(file)
    make = "" if os.path.isdir(directory) else f"mkdir -p -m 700 {shlex.quote(directory)} && "
    accept = f"{make}echo {shlex.quote(f'{names[0]} {key_type} {key}')} >> {shlex.quote(file)}"
    if verdict is Verdict.CHANGED:
        name, own = shlex.quote(names[0]), lines[0].where.rpartition(":")[0]
        raise HostKeyRefused(
            settings.alias,
            f"ITS HOST KEY HAS CHANGED: it is {mark}, and {where} says otherwise; somebody may be listening in. "
            f"If the host was installed anew: ssh-keygen -R {name} -f {shlex.quote(own)} && {accept}",
        )
    authority = f" (accel checks no certificates, as of the authority in {where})" if lines else ""
    raise HostKeyRefused(
        settings.alias,
        f"its host key is not known{authority}: {settings.endpoint} has {mark}; if that is right: {accept}",
    )


def _reach(settings: Settings, via: Connection | None, patience: Patience) -> HeardStream:
    seconds = settings.connect_timeout_s or patience.connect_s
    if via is not None:
        channel = via.open_way(settings.hostname, settings.port, seconds)
        return HeardStream(channel)
    if settings.proxy_command is not None:
        return by_proxy(settings, settings.proxy_command)
    return HeardStream(by_socket(settings, seconds))


def library() -> None:
    """Raises SchedulerError, with the line that mends it, where paramiko is not installed."""
    try:
        import paramiko  # noqa: F401
    except ImportError:
        raise SchedulerError("SSH needs paramiko, which is not installed: pip install 'accel-launch[ssh]'") from None
    import logging

    # Every problem is raised; without a handler Python would also print them, with tracebacks.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
