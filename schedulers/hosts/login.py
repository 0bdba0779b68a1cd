"""Login with the keys of the agent and those in files. No password is ever prompted for or sent."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import socket
from collections.abc import Generator, Iterator
from typing import Any

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthStrategy, InMemoryPrivateKey, SourceResult

from .errors import HostUnreachable, LoginRefused
from .ssh_config import Settings

_AGENT_S = 10.0
_PORT = 22


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
                    raise LoginRefused(settings.alias, _no_keys_taken(settings, error.allowed_types)) from None
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
    """Read a key file, once for all hosts until the file changes. Raises whatever paramiko does."""
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


def _no_keys_taken(settings: Settings, allowed: list[str]) -> str:
    return f"the server accepts no keys from {settings.user}, only {', '.join(allowed)}; accel supports keys only"
