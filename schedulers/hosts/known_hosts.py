"""known_hosts files as OpenSSH reads them: patterns, hashed names, `@revoked`, ports in brackets.

All functions are pure.
"""

from __future__ import annotations

import base64
import binascii
import enum
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HASHED = "|1|"
_SSH_PORT = 22


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
