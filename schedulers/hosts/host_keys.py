"""Verification of host keys against known_hosts and revocations. Each file is read once until it changes."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Sequence

from . import known_hosts, revoked_keys
from .errors import HostKeyRefused
from .known_hosts import KnownKey, Verdict
from .ssh_config import Settings


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
    problem = revoked_keys.problem(settings.revoked, key_type, key) if settings.revoked else None
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
