"""Sockets for connections without a jump host: TCP, or the user's own ProxyCommand."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from typing import IO

from .errors import HostUnreachable, one_line
from .ssh_config import Settings

_MAX_STDERR = 1 << 16  # last bytes of a ProxyCommand's standard error


def connect_socket(settings: Settings, seconds: float) -> socket.socket:
    """Connect to the host. Raises HostUnreachable, after at most `seconds` for each of its addresses."""
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(settings.family, socket.AF_UNSPEC)
    try:
        addrinfo = socket.getaddrinfo(settings.hostname, settings.port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HostUnreachable(
            settings.alias, f"no address for the name {settings.hostname!r} ({_reason(error)})"
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
            problem = f"{settings.endpoint}: {_reason(error)}"
        sock.close()
    raise HostUnreachable(settings.alias, problem)


class ProxyCommand:
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
            raise HostUnreachable(settings.alias, f"ProxyCommand cannot be run: {_reason(error)}") from None
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


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
