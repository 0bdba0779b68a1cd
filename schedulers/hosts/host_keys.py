"""Verification of host keys against known_hosts and revocations. Each file is read once until it changes."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
from collections.abc import Sequence

from . import known_hosts
from .errors import HostKeyRefused, one_line
from .known_hosts import KnownKey, Verdict
from .ssh_config import Settings

_KRL = b"SSHKRL\n\0"
_COMMAND_TIMEOUT_S = 20
_REVOKED = 1


def known_keys(files: Sequence[str]) -> list[KnownKey]:
    """Return the keys in these known_hosts files; a file that cannot be read has none."""
    keys: list[KnownKey] = []
    for file in files:
        with contextlib.suppress(OSError):
            stat = os.stat(file)
            keys += _read(file, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return keys


@functools.lru_cache(maxsize=16)
def _read(file: str, state: tuple[int, ...]) -> list[KnownKey]:
    with open(file, encoding="utf-8", errors="surrogateescape") as stream:
        return known_hosts.read(stream.read(), file)


def names(settings: Settings) -> list[str]:
    """Return the names under which the host's key may be listed."""
    return known_hosts.lookup_names(settings.hostname, settings.port, settings.key_alias)


def check(settings: Settings, known: list[KnownKey], key_type: str, key: str, fingerprint: str) -> None:
    """Raise HostKeyRefused, with the remedy, unless the key (its base64 text) is known and not revoked."""
    lookup_names = names(settings)
    verdict, lines = known_hosts.verify_key(known, lookup_names, key_type, key)
    label = f"{key_type} {fingerprint}"
    problem = _revocation(settings.revoked, key_type, key) if settings.revoked else None
    if problem is not None:
        raise HostKeyRefused(settings.alias, f"its host key, {label}, {problem}")
    if verdict is Verdict.KNOWN:
        return
    locations = ", ".join(line.location for line in lines)
    if verdict is Verdict.REVOKED:
        raise HostKeyRefused(settings.alias, f"its host key, {label}, is revoked ({locations})")
    file = settings.known_hosts[0] if settings.known_hosts else os.path.expanduser("~/.ssh/known_hosts")
    directory = os.path.dirname(file)
    mkdir = "" if os.path.isdir(directory) else f"mkdir -p -m 700 {shlex.quote(directory)} && "
    accept = f"{mkdir}echo {shlex.quote(f'{lookup_names[0]} {key_type} {key}')} >> {shlex.quote(file)}"
    if verdict is Verdict.CHANGED:
        name, key_file = shlex.quote(lookup_names[0]), lines[0].location.rpartition(":")[0]
        raise HostKeyRefused(
            settings.alias,
            f"ITS HOST KEY HAS CHANGED: it is {label}, and {locations} says otherwise; somebody may be listening in. "
            f"If the host was installed anew: ssh-keygen -R {name} -f {shlex.quote(key_file)} && {accept}",
        )
    authority = f" (accel does not check certificates of the authority in {locations})" if lines else ""
    raise HostKeyRefused(
        settings.alias,
        f"its host key is not known{authority}: {settings.endpoint} has {label}; if that is right: {accept}",
    )


# Host keys revoked by a file (`RevokedHostKeys`): a list of public keys, or a KRL of ssh-keygen.


def _revocation(file: str, key_type: str, key: str) -> str | None:
    """Return why this key (its base64 text) must not be trusted; None if the file does not revoke it.

    As with OpenSSH, a file that cannot be read, or has a line that is no key, revokes every key.
    """
    try:
        with open(file, "rb") as stream:
            content = stream.read()
    except OSError as error:
        return _unreadable(file, (error.strerror or str(error)).lower())
    if content.startswith(_KRL):
        return _in_krl(file, key_type, key)
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) < 2:
            return _unreadable(file, f"its line {number} is no public key")
        if fields[1] == key:
            return f"is revoked ({file}:{number})"
    return None


def _in_krl(file: str, key_type: str, key: str) -> str | None:
    try:
        completed = subprocess.run(
            ["ssh-keygen", "-Q", "-f", file, "/dev/stdin"],
            input=f"{key_type} {key}\n".encode(),
            capture_output=True,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _unreadable(file, one_line(str(error)))
    if completed.returncode == 0:
        return None
    return f"is revoked ({file})" if completed.returncode == _REVOKED else _unreadable(file, one_line(completed.stderr))


def _unreadable(file: str, reason: str) -> str:
    return f"may be revoked: RevokedHostKeys names {file}, which cannot be used ({reason})"
