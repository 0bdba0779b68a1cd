"""Logging in with keys: those of the agent, and those in files. No password is ever asked for or sent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import HostUnreachable, LoginRefused
from .ssh_config import Settings

if TYPE_CHECKING:
    import paramiko

_AGENT_S = 10.0
_PORT = 22


class Keys:
    """The private keys in files, each read once for all hosts. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, paramiko.PKey | str] = {}

    def load(self, path: str) -> paramiko.PKey | str:
        """The key, or in a few words why there is none."""
        with self._lock:
            if path not in self._read:
                self._read[path] = _load(path)
            return self._read[path]


def log_in(transport: paramiko.Transport, settings: Settings, keys: Keys) -> None:
    """Tries the agent's keys that the configuration names, then its others, then the files, as OpenSSH does.

    Raises LoginRefused with every key that was tried and every one that could not be.
    """
    import paramiko

    tried: list[str] = []
    beside = {f"{path}-cert.pub" for path in settings.identities}
    unusable = [
        f"{path} is not used: a certificate is only beside its key (KEY-cert.pub)"
        for path in settings.certificates
        if path not in beside
    ]
    with _agent(settings.agent, unusable) as agent:
        for name, key in _candidates(settings, keys, agent, unusable):
            tried.append(name)
            try:
                wanted = transport.auth_publickey(settings.user, key)
            except paramiko.BadAuthenticationType as error:
                raise LoginRefused(settings.alias, _no_keys_taken(settings, error.allowed_types)) from None
            except paramiko.AuthenticationException:
                if transport.is_active():
                    continue
                raise LoginRefused(settings.alias, _refused(settings, tried, unusable, cut_off=True)) from None
            except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
                # A key that cannot sign (a token that is not plugged in) is like one that is not there.
                if not transport.is_active():
                    raise HostUnreachable(settings.alias, f"lost the connection while logging in: {error}") from None
                unusable.append(f"{name}: {error}")
                continue
            if wanted:
                raise LoginRefused(
                    settings.alias,
                    f"the server also wants {' and '.join(wanted)}, which accel cannot give: it has keys",
                )
            return
    raise LoginRefused(settings.alias, _refused(settings, tried, unusable, cut_off=False))


def _candidates(
    settings: Settings, keys: Keys, agent: tuple[paramiko.AgentKey, ...], unusable: list[str]
) -> Iterator[tuple[str, Any]]:
    held = {key.asbytes(): key for key in agent}
    named = {path: held.pop(public) for path in settings.identities if (public := _public(path)) in held}
    for path, key in named.items():
        yield f"{path} (agent)", key
    if not settings.identities_only:
        for key in held.values():
            yield f"{key.comment or key.get_name()} (agent)", key
    for path in settings.identities:
        if path in named:
            continue
        loaded = keys.load(path)
        if isinstance(loaded, str):
            if loaded:
                unusable.append(loaded)
        else:
            yield path, loaded


def _public(path: str) -> bytes:
    """The public half beside a key's file; empty where there is none."""
    import base64

    with contextlib.suppress(OSError, ValueError, IndexError):
        for name in (f"{path}-cert.pub", f"{path}.pub", path):
            if name.endswith(".pub") and os.path.exists(name):
                with open(name) as file:
                    return base64.b64decode(file.read().split()[1])
    return b""


def _load(path: str) -> paramiko.PKey | str:
    import paramiko

    if not os.path.exists(path) or path.endswith(".pub"):
        return ""  # the names that OpenSSH looks for of itself are usually not there
    try:
        return paramiko.PKey.from_path(path)
    except (TypeError, paramiko.PasswordRequiredException):
        return f"{path} needs its passphrase: ssh-add {path}"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except Exception as error:  # whatever the libraries below find wrong with a file
        return f"{path} is no private key that can be used ({type(error).__name__})"


@contextlib.contextmanager
def _agent(path: str | None, unusable: list[str]) -> Iterator[tuple[paramiko.AgentKey, ...]]:
    """The keys of the agent that listens at `path`; none without one. Signing works only inside."""
    if path is None:
        yield ()
        return
    import paramiko
    from paramiko.agent import AgentSSH

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
    return f"the server takes no keys from {settings.user}, only {', '.join(allowed)}; accel logs in with keys"


def _refused(settings: Settings, tried: list[str], unusable: list[str], *, cut_off: bool) -> str:
    port = f"-p {settings.port} " if settings.port != _PORT else ""
    copy = f"ssh-copy-id {port}{settings.user}@{settings.alias}"
    if not tried:
        text = f"no key to log in as {settings.user} with"
        remedy = f"; make one (ssh-keygen) and take it there ({copy})"
    else:
        text = f"does not let {settings.user} in; tried {', '.join(tried)}"
        cut = "; the server hung up after these: name the right one (IdentityFile, IdentitiesOnly yes)"
        remedy = cut if cut_off else f"; check the user, or {copy}"
    return text + (f"; {'; '.join(unusable)}" if unusable else "") + remedy
