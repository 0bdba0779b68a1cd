"""What a connection runs over: a TCP socket, the user's own ProxyCommand, or a channel of another connection."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Protocol

from .errors import HostUnreachable, one_line
from .ssh_config import Settings

_SAID = 1 << 16  # bytes of what a ProxyCommand said last


class Stream(Protocol):
    """What a connection runs over: a socket, or a channel of another connection."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, count: int, /) -> bytes: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class HeardStream:
    """A stream that knows when it last brought something."""

    def __init__(
        self, stream: Stream, at_close: Callable[[], None] | None = None, explain: Callable[[], str] | None = None
    ) -> None:
        self._stream = stream
        self._at_close = at_close
        self._explain = explain
        self._closing = threading.Lock()
        self._closed = False  # paramiko looks at this name
        self.heard = time.monotonic()

    def send(self, data: bytes) -> int:
        return self._stream.send(data)

    def recv(self, count: int) -> bytes:
        data = self._stream.recv(count)
        self.heard = time.monotonic()
        return data

    def settimeout(self, seconds: float | None) -> None:
        self._stream.settimeout(seconds)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._stream.close()
            if self._at_close is not None:
                self._at_close()

    def explanation(self) -> str:
        """What whoever made the stream said on its end; empty for a plain socket."""
        return self._explain() if self._explain is not None else ""


def by_socket(settings: Settings, seconds: float) -> socket.socket:
    """Connected to the host. Raises HostUnreachable, at the latest after `seconds` for each of its addresses."""
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(settings.family, socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(settings.hostname, settings.port, family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HostUnreachable(
            settings.alias, f"no address for the name {settings.hostname!r} ({_reason(error)})"
        ) from None
    problem = "it has no address"
    for kind, type, protocol, _, address in found:
        opened = socket.socket(kind, type, protocol)
        try:
            opened.settimeout(seconds)
            if settings.bind_address:
                opened.bind((settings.bind_address, 0))
            opened.connect(address)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return opened
        except TimeoutError:
            problem = f"no answer from {settings.endpoint} within {seconds:g} s"
        except OSError as error:
            problem = f"{settings.endpoint}: {_reason(error)}"
        opened.close()
    raise HostUnreachable(settings.alias, problem)


def by_proxy(settings: Settings, command: str) -> HeardStream:
    """The user's ProxyCommand, run by the user's shell, as OpenSSH does. Raises HostUnreachable."""
    ours, its = socket.socketpair()
    said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the stream
    shell = os.environ.get("SHELL") or "/bin/sh"
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=said,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        said.close()
        raise HostUnreachable(settings.alias, f"ProxyCommand cannot be run: {_reason(error)}") from None
    finally:
        its.close()

    last_words = "ProxyCommand ended"

    def end() -> None:
        nonlocal last_words
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID))
        text = said.read()
        if text.strip():
            last_words = f"ProxyCommand said: {one_line(text)}"
        said.close()

    def explain() -> str:
        stream.close()
        return last_words

    stream = HeardStream(ours, end, explain)
    return stream


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
