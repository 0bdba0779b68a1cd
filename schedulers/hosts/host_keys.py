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
    found: list[KnownKey] = []
    for file in files:
        with contextlib.suppress(OSError):
            stat = os.stat(file)
            found += _read(file, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found


@functools.lru_cache(maxsize=16)
def _read(file: str, state: tuple[int, ...]) -> list[KnownKey]:
    with open(file, encoding="utf-8", errors="surrogateescape") as opened:
        return known_hosts.read(opened.read(), file)


def names(settings: Settings) -> list[str]:
    """Return the names under which the host's key may be listed."""
    return known_hosts.looked_up_as(settings.hostname, settings.port, settings.key_alias)


def check(settings: Settings, known: list[KnownKey], key_type: str, key: str, fingerprint: str) -> None:
    """Raise HostKeyRefused, with the remedy, unless the key (its base64 text) is known and not revoked."""
    looked_up = names(settings)
    verdict, lines = known_hosts.judge(known, looked_up, key_type, key)
    mark = f"{key_type} {fingerprint}"
    problem = revoked_keys.problem(settings.revoked, key_type, key) if settings.revoked else None
    if problem is not None:
        raise HostKeyRefused(settings.alias, f"its host key, {mark}, {problem}")
    if verdict is Verdict.KNOWN:
        return
    where = ", ".join(line.where for line in lines)
    if verdict is Verdict.REVOKED:
        raise HostKeyRefused(settings.alias, f"its host key, {mark}, is revoked ({where})")
    file = settings.known_hosts[0] if settings.known_hosts else os.path.expanduser("~/.ssh/known_hosts")
    directory = os.path.dirname(file)
    make = "" if os.path.isdir(directory) else f"mkdir -p -m 700 {shlex.quote(directory)} && "
    accept = f"{make}echo {shlex.quote(f'{looked_up[0]} {key_type} {key}')} >> {shlex.quote(file)}"
    if verdict is Verdict.CHANGED:
        name, own = shlex.quote(looked_up[0]), lines[0].where.rpartition(":")[0]
        raise HostKeyRefused(
            settings.alias,
            f"ITS HOST KEY HAS CHANGED: it is {mark}, and {where} says otherwise; somebody may be listening in. "
            f"If the host was installed anew: ssh-keygen -R {name} -f {shlex.quote(own)} && {accept}",
        )
    authority = f" (accel checks no certificates, as of the authority in {where})" if lines else ""
    raise HostKeyRefused(
        settings.alias,
        f"its host key is not known{authority}: {settings.endpoint} has {mark}; if that is right: {accept}",
    )
