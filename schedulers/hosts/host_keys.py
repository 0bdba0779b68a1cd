"""Verification of host keys against known_hosts files, read as OpenSSH does, and against revocations.

Each file is read once until it changes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import enum
import fnmatch
import functools
import hashlib
import hmac
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import HostKeyRefused, one_line
from .ssh_config import Settings

_HASHED = "|1|"
_SSH_PORT = 22
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
        return read(stream.read(), file)


def check(settings: Settings, known: list[KnownKey], key_type: str, key: str, fingerprint: str) -> None:
    """Raise HostKeyRefused, with the remedy, unless the key (its base64 text) is known and not revoked."""
    listed_names = lookup_names(settings.hostname, settings.port, settings.key_alias)
    verdict, lines = verify_key(known, listed_names, key_type, key)
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
    accept = f"{mkdir}echo {shlex.quote(f'{listed_names[0]} {key_type} {key}')} >> {shlex.quote(file)}"
    if verdict is Verdict.CHANGED:
        name, key_file = shlex.quote(listed_names[0]), lines[0].location.rpartition(":")[0]
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


# The lines of known_hosts files: patterns, hashed names, `@revoked`, ports in brackets. All functions below are pure.


@dataclass(frozen=True)
class KnownKey:
    """One line of a file. `key` is the base64 text; `marker` is '', '@revoked' or '@cert-authority'."""

    names: str
    type: str
    key: str
    marker: str
    location: str

    def matches(self, name: str) -> bool:
        """Return True if any pattern matches, and none that begins with `!` (sshd(8))."""
        if self.names.startswith(_HASHED):
            return _hash_matches(self.names, name)
        matched = False
        for pattern in self.names.lower().split(","):
            negated = pattern.startswith("!")
            # Brackets stand for themselves here: they hold an address that has a port.
            plain = pattern.removeprefix("!").replace("[", "[[]")
            if fnmatch.fnmatchcase(name.lower(), plain):
                if negated:
                    return False
                matched = True
        return matched


class Verdict(enum.Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


def read(text: str, file: str) -> list[KnownKey]:
    """Return every key in a file. As with OpenSSH, an invalid line is skipped."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) >= 3 and not fields[0].startswith("#"):
            entries.append(KnownKey(fields[0], fields[1], fields[2], marker, f"{file}:{number}"))
    return entries


def lookup_names(name: str, port: int, alias: str | None) -> list[str]:
    """Return the names under which a host's key may be listed; the first is the one for a new line."""
    if alias is not None:
        return [alias]
    return [name] if port == _SSH_PORT else [f"[{name}]:{port}", name]


def verify_key(
    known: Iterable[KnownKey], names: Sequence[str], key_type: str, key: str
) -> tuple[Verdict, list[KnownKey]]:
    """Return the verdict on this key for a host with one of these names, and the lines that decide it.

    For an unknown host, they are the lines of authorities that may certify it. A key under the host's plain name
    is as good as under its name with the port, as with OpenSSH; another key there is not a change.
    """
    matching = [entry for entry in known if any(entry.matches(name) for name in names)]
    revoked = [entry for entry in matching if entry.marker == "@revoked" and entry.key == key]
    if revoked:
        return Verdict.REVOKED, revoked
    plain = [entry for entry in matching if not entry.marker]
    trusted = [entry for entry in plain if (entry.type, entry.key) == (key_type, key)]
    if trusted:
        return Verdict.KNOWN, trusted
    conflicting = [entry for entry in plain if entry.matches(names[0])]
    authorities = [entry for entry in matching if entry.marker == "@cert-authority"]
    return (Verdict.CHANGED, conflicting) if conflicting else (Verdict.UNKNOWN, authorities)


def known_types(known: Iterable[KnownKey], names: Sequence[str]) -> list[str]:
    """Return the key types under which the host is known, to be requested first."""
    types = [entry.type for entry in known if not entry.marker and any(entry.matches(name) for name in names)]
    return list(dict.fromkeys(types))


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        computed = hmac.new(base64.b64decode(salt), name.lower().encode(), hashlib.sha1).digest()
        return hmac.compare_digest(computed, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False
