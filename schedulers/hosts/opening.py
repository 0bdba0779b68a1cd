"""Opening of connections: Fabric's `Connection` over paramiko, with a verified host key and a login by keys.

Fabric's own files are not read; the settings of `~/.ssh/config` are passed as `Settings`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any

import fabric
import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthStrategy, InMemoryPrivateKey, SourceResult
from paramiko.packet import Packetizer

from . import host_keys
from .connection import Connection, Timeouts
from .errors import HostUnreachable, LoginRefused, one_line
from .host_keys import KnownKey
from .ssh_config import Settings

_RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")
_AGENT_S = 10.0
_PORT = 22
_MAX_STDERR = 1 << 16  # last bytes of a ProxyCommand's standard error


def connect(settings: Settings, *, via: Connection | None, timeouts: Timeouts) -> Connection:
    """Open a connection to the host, logged in, its key verified. Raises HostUnreachable and its subclasses."""
    seconds = settings.connect_timeout_s or timeouts.connect_s
    entries = host_keys.known_keys(settings.known_hosts)
    names = host_keys.lookup_names(settings.hostname, settings.port, settings.key_alias)
    types = host_keys.known_types(entries, names)
    preferred = [name for type in types for name in (_RSA_ALGORITHMS if type == "ssh-rsa" else (type,))]
    sock: Any = None
    if via is None and settings.proxy_command is not None:
        sock = _ProxyCommand(settings, settings.proxy_command)
    elif via is None:
        sock = _connect_socket(settings, seconds)
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
            "transport_factory": functools.partial(_Transport, preferred, seconds),
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


# Login with the keys of the agent and those in files.


class LogIn(AuthStrategy):
    """A login by keys, in OpenSSH's order: the agent's keys that the configuration names, its others, key files.

    It is used once. No password is ever prompted for or sent.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(paramiko.SSHConfig())
        self._settings = settings
        key_certificates = {f"{path}-cert.pub" for path in settings.identities}
        self._unusable = [
            f"{path} is not used: a certificate must be next to its key (KEY-cert.pub)"
            for path in settings.certificates
            if path not in key_certificates
        ]

    def get_sources(self) -> Generator[_Key, None, None]:
        settings = self._settings
        with _agent(settings.agent, self._unusable) as agent:
            agent_keys = {key.asbytes(): key for key in agent}
            named_keys = {
                path: agent_keys.pop(public) for path in settings.identities if (public := _public(path)) in agent_keys
            }
            for path, key in named_keys.items():
                yield _Key(settings.user, f"{path} (agent)", key)
            if not settings.identities_only:
                for key in agent_keys.values():
                    yield _Key(settings.user, f"{key.comment or key.get_name()} (agent)", key)
            for path in settings.identities:
                if path in named_keys:
                    continue
                loaded = _load(path)
                if not isinstance(loaded, str):
                    yield _Key(settings.user, path, loaded)
                elif loaded:
                    self._unusable.append(loaded)

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Log in. Raises LoginRefused, with every key that was tried or could not be used, and HostUnreachable."""
        settings = self._settings
        tried: list[str] = []
        with contextlib.closing(self.get_sources()) as sources:
            for source in sources:
                tried.append(source.name)
                try:
                    methods = source.authenticate(transport)
                except paramiko.BadAuthenticationType as error:
                    allowed = ", ".join(error.allowed_types)
                    problem = (
                        f"the server accepts no keys from {settings.user}, only {allowed}; accel supports keys only"
                    )
                    raise LoginRefused(settings.alias, problem) from None
                except paramiko.AuthenticationException:
                    if transport.is_active():
                        continue
                    raise LoginRefused(settings.alias, self._rejection_message(tried, cut_off=True)) from None
                except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
                    # A key that cannot sign (an unplugged token) is skipped like a missing one.
                    if not transport.is_active():
                        problem = f"lost the connection while logging in: {error}"
                        raise HostUnreachable(settings.alias, problem) from None
                    self._unusable.append(f"{source.name}: {error}")
                    continue
                if methods:
                    missing = " and ".join(methods)
                    problem = f"the server also requires {missing}, but accel supports keys only"
                    raise LoginRefused(settings.alias, problem)
                return [SourceResult(source, methods)]
        raise LoginRefused(settings.alias, self._rejection_message(tried, cut_off=False))

    def _rejection_message(self, tried: list[str], *, cut_off: bool) -> str:
        settings = self._settings
        port = f"-p {settings.port} " if settings.port != _PORT else ""
        copy = f"ssh-copy-id {port}{settings.user}@{settings.alias}"
        if not tried:
            text = f"no key to log in as {settings.user}"
            remedy = f"; create one (ssh-keygen) and copy it there ({copy})"
        else:
            text = f"does not let {settings.user} in; tried {', '.join(tried)}"
            hint = "; the server hung up after these: name the right one (IdentityFile, IdentitiesOnly yes)"
            remedy = hint if cut_off else f"; check the user, or {copy}"
        return text + (f"; {'; '.join(self._unusable)}" if self._unusable else "") + remedy


class _Key(InMemoryPrivateKey):
    """A key, and its name for a message."""

    def __init__(self, username: str, name: str, pkey: paramiko.PKey) -> None:
        super().__init__(username, pkey)
        self.name = name


def _public(path: str) -> bytes:
    """Return the public half next to a key's file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for name in (f"{path}-cert.pub", f"{path}.pub", path):
            if name.endswith(".pub") and os.path.exists(name):
                with open(name) as file:
                    return base64.b64decode(file.read().split()[1])
    return b""


def _load(path: str) -> paramiko.PKey | str:
    """Return the key, or a short reason why there is none; empty if there is no such file (OpenSSH's default names)."""
    if path.endswith(".pub"):
        return ""
    try:
        stat = os.stat(path)
        return _read(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    except FileNotFoundError:
        return ""
    except (TypeError, paramiko.PasswordRequiredException):
        return f"{path} needs its passphrase: ssh-add {path}"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except Exception as error:  # whatever the libraries below find wrong with a file
        return f"{path} is not a usable private key ({type(error).__name__})"


@functools.lru_cache(maxsize=16)
def _read(path: str, state: tuple[int, ...]) -> paramiko.PKey:
    """Read a key file, once for all hosts until the file changes. Raises paramiko's errors."""
    return paramiko.PKey.from_path(path)


@contextlib.contextmanager
def _agent(path: str | None, unusable: list[str]) -> Iterator[tuple[paramiko.AgentKey, ...]]:
    """Yield the keys of the agent that listens at `path`; none without one. Signing works only inside."""
    if path is None:
        yield ()
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(_AGENT_S)
        agent: Any = AgentSSH()
        try:
            connection.connect(path)
            agent._connect(connection)
        except (OSError, paramiko.SSHException) as error:
            unusable.append(f"the agent at {path} does not answer ({error})")
            yield ()
        else:
            yield tuple(agent.get_keys())
