"""Opening of connections: Fabric's `Connection` over paramiko, with a verified host key and a login by keys.

Fabric's own files are not read; the settings of `~/.ssh/config` are passed as `Settings`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

import fabric
import paramiko
from paramiko.packet import Packetizer

from . import host_keys
from .connection import Connection, Timeouts
from .errors import HostUnreachable, one_line
from .host_keys import KnownKey
from .login import LogIn
from .ssh_config import Settings

_RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")
_MAX_STDERR = 1 << 16  # last bytes of a ProxyCommand's standard error


def connect(settings: Settings, *, via: Connection | None, timeouts: Timeouts) -> Connection:
    """Open a connection to the host, logged in, its key verified. Raises HostUnreachable and its subclasses."""
    seconds = settings.connect_timeout_s or timeouts.connect_s
    entries = host_keys.known_keys(settings.known_hosts)
    sock = None if via is not None else _open_socket(settings, seconds)
    ssh = fabric.Connection(
        settings.hostname,
        user=settings.user,
        port=settings.port,
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        gateway=None if via is None else via.ssh,
        forward_agent=False,
        inline_ssh_env=False,
        connect_kwargs={
            "sock": sock,
            "timeout": seconds,
            "transport_factory": functools.partial(_Transport, _known_algorithms(settings, entries), seconds),
            "auth_strategy": LogIn(settings),
        },
    )
    ssh.client.set_missing_host_key_policy(_HostKeyPolicy(settings, entries))
    try:
        ssh.open()
        return Connection(settings, ssh, timeouts)
    except BaseException as error:
        _close_transport(ssh.client.get_transport(), sock)
        if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            raise _problem(settings, error, sock, ssh.client.get_transport(), via) from None
        raise


class _HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """A policy that passes every host key to `host_keys.check`; the client itself knows none."""

    def __init__(self, settings: Settings, entries: list[KnownKey]) -> None:
        self._settings = settings
        self._entries = entries

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        host_keys.check(self._settings, self._entries, key.get_name(), key.get_base64(), key.fingerprint)


class _Packets(Packetizer):
    """A packetizer that records the time (`time.monotonic`) of the last packet received."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self.last_packet_at = time.monotonic()

    def read_message(self) -> Any:
        message = super().read_message()
        self.last_packet_at = time.monotonic()
        return message


class _Transport(paramiko.Transport):
    """A transport that requests the host's known key types first, and waits `seconds` at most."""

    def __init__(self, preferred: Sequence[str], seconds: float, sock: Any, **options: Any) -> None:
        super().__init__(sock, packetizer_class=_Packets, **options)
        self.banner_timeout = self.handshake_timeout = self.auth_timeout = self.channel_timeout = seconds
        security = self.get_security_options()
        offered = list(security.key_types)
        supported = [name for name in preferred if name in offered]
        security.key_types = [*supported, *(name for name in offered if name not in supported)]


def _known_algorithms(settings: Settings, entries: list[KnownKey]) -> list[str]:
    types = host_keys.known_types(entries, host_keys.names(settings))
    return [name for type in types for name in (_RSA_ALGORITHMS if type == "ssh-rsa" else (type,))]


def _open_socket(settings: Settings, seconds: float) -> Any:
    if settings.proxy_command is not None:
        return _ProxyCommand(settings, settings.proxy_command)
    return _connect_socket(settings, seconds)


def _close_transport(transport: paramiko.Transport | None, sock: Any) -> None:
    if transport is not None:
        transport.close()
        packetizer: Any = transport.packetizer
        packetizer.complete_handshake()  # else its timer delays the program's exit
        sock = transport.sock
    if sock is not None:
        sock.close()


def _problem(
    settings: Settings, error: BaseException, sock: Any, transport: paramiko.Transport | None, via: Connection | None
) -> HostUnreachable:
    detail = one_line(str(error)) if str(error) else "the connection was closed"
    if via is not None and transport is None:
        if isinstance(error, paramiko.ChannelException):
            detail = {1: "forwarding forbidden (AllowTcpForwarding)", 2: "connection failed"}.get(error.code, detail)
        return HostUnreachable(via.settings.alias, f"as a jump host to {settings.hostname}:{settings.port}: {detail}")
    if isinstance(sock, _ProxyCommand):
        detail = sock.explanation
    return HostUnreachable(settings.alias, f"{settings.endpoint} answers, but the SSH handshake fails: {detail}")


# Sockets for connections without a jump host: TCP, or the user's own ProxyCommand.


def _connect_socket(settings: Settings, seconds: float) -> socket.socket:
    """Connect to the host. Raises HostUnreachable, after at most `seconds` for each of its addresses."""
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(settings.family, socket.AF_UNSPEC)
    try:
        addrinfo = socket.getaddrinfo(settings.hostname, settings.port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HostUnreachable(
            settings.alias, f"no address for the name {settings.hostname!r} ({_cause(error)})"
        ) from None
    problem = "it has no address"
    for kind, type, protocol, _, address in addrinfo:
        sock = socket.socket(kind, type, protocol)
        try:
            sock.settimeout(seconds)
            if settings.bind_address:
                sock.bind((settings.bind_address, 0))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except TimeoutError:
            problem = f"no answer from {settings.endpoint} within {seconds:g} s"
        except OSError as error:
            problem = f"{settings.endpoint}: {_cause(error)}"
        sock.close()
    raise HostUnreachable(settings.alias, problem)


class _ProxyCommand:
    """The user's ProxyCommand, run by the user's shell as OpenSSH does, as a socket for paramiko.

    After `close`, `explanation` has what it printed on standard error. Raises HostUnreachable.
    """

    def __init__(self, settings: Settings, command: str) -> None:
        self._socket, child_socket = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._closing = threading.Lock()
        self._closed = False  # paramiko looks at this name
        self.explanation = "ProxyCommand ended"
        shell = os.environ.get("SHELL") or "/bin/sh"
        try:
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=child_socket.fileno(),
                stdout=child_socket.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            self._stderr.close()
            raise HostUnreachable(settings.alias, f"ProxyCommand cannot be run: {_cause(error)}") from None
        finally:
            child_socket.close()
        self.send, self.recv, self.settimeout = self._socket.send, self._socket.recv, self._socket.settimeout

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _MAX_STDERR))
            text = self._stderr.read()
            if text.strip():
                self.explanation = f"ProxyCommand printed: {one_line(text)}"
            self._stderr.close()


def _cause(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
