"""Fan-out of a blob to many hosts: sent to one, which forwards it, as it arrives, to two others, and so on.

The hosts need no keys for each other. Each listens, during the fan-out, for peers that prove to know a token
sent to each of them over SSH; received data is stored only under its digest. Traffic between the hosts is not
encrypted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import SchedulerError
from . import replies
from .errors import RemoteError, one_line
from .host_list import Host
from .remote_files import TRANSFER_S, Blob, host_programs, program_call, read_reply, send_blob
from .session import Session
from .transport import Pool, Remote

T = TypeVar("T")

FROM_HOSTS = 16
# To all hosts together: 1.3 s at 100 Mbit/s, about the cost of a fan-out: one more session with each of many hosts.
FROM_BYTES = 16_000_000
_CHILDREN = 2
_ROUNDS = 3
_REPLY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FanOutResult:
    """Numbers of hosts in a fan-out.

    had:     had the blob before.
    sent:    received it from here.
    relayed: received it from another host.
    missing: still lack it.
    """

    had: int = 0
    sent: int = 0
    relayed: int = 0
    missing: int = 0


def worthwhile(count: int, blob: Blob) -> bool:
    return count >= FROM_HOSTS and count * blob.size >= FROM_BYTES


def fan_out(
    pool: Pool,
    addresses: Mapping[Host, str],
    blob: Blob,
    *,
    root: str,
    python: str,
    ports: Mapping[Host, Sequence[int]],
) -> FanOutResult:
    """Copy the blob to the hosts, as far as they reach each other at these addresses and ports.

    A host that cannot be reached, or does not receive it, is no error here: the caller sends it to hosts that
    need it.
    """
    token = os.urandom(32).hex()

    def open_relay(remote: Remote) -> _RelaySession:
        return _RelaySession(remote, blob, root=root, python=python, ports=ports[remote.host], token=token)

    outcomes = pool.map(open_relay, list(addresses))
    relays = {outcome.host: outcome.value for outcome in outcomes if outcome.value is not None}
    try:
        return _relay_rounds(pool, addresses, relays)
    finally:
        for relay in relays.values():
            relay.close()


def _relay_rounds(pool: Pool, addresses: Mapping[Host, str], relays: Mapping[Host, _RelaySession]) -> FanOutResult:
    holders = [host for host, relay in relays.items() if relay.have]
    missing = [host for host in relays if host not in holders]
    initial_count = len(holders)
    sent = relayed = 0
    failures: Counter[Host] = Counter()
    failed_parents: set[Host] = set()  # have the blob, and a host did not receive it from them
    for _ in range(_ROUNDS):
        if not missing:
            break
        parents = _tree([host for host in holders if host not in failed_parents], missing, relays)

        def fetch(remote: Remote, parents: Mapping[Host, Host | None] = parents) -> None:
            parent = parents[remote.host]
            source = None if parent is None else (addresses[parent], relays[parent].port)
            relays[remote.host].get(source)

        done = [outcome.host for outcome in pool.map(fetch, list(parents)) if outcome.error is None]
        sent += sum(parents[host] is None for host in done)
        relayed += sum(parents[host] is not None for host in done)
        holders += done
        # A host whose parent has the blob failed by itself, its descendants because of it. The more often a host
        # failed by itself, the later its next turn, and the fewer hosts depend on it.
        failed = [host for host in missing if host not in done]
        for host in failed:
            parent = parents.get(host)
            failures[host] += host in parents and (parent is None or parent in holders)
            if parent is not None and parent in holders:
                failed_parents.add(parent)
        missing = sorted(failed, key=failures.__getitem__)
    return FanOutResult(had=initial_count, sent=sent, relayed=relayed, missing=len(addresses) - len(holders))


def _tree(
    holders: Sequence[Host], missing: Sequence[Host], relays: Mapping[Host, _RelaySession]
) -> dict[Host, Host | None]:
    """Return each host's source, None for us, parents before children; a host that cannot listen has no children."""
    free_parents = [host for host in holders if relays[host].port is not None for _ in range(_CHILDREN)]
    parents: dict[Host, Host | None] = {}
    for host in sorted(missing, key=lambda host: relays[host].port is None):
        if not free_parents and parents:
            break  # no host that receives it can forward it
        parents[host] = free_parents.pop(0) if free_parents else None
        if relays[host].port is not None:
            free_parents += [host] * _CHILDREN
    return parents


class _RelaySession:
    """A session with the relay on one host, which receives the blob and forwards it until this is closed."""

    def __init__(self, remote: Remote, blob: Blob, *, root: str, python: str, ports: Sequence[int], token: str) -> None:
        self._name, self._python = remote.name, python
        self._blob = blob
        request = {"root": root, "digest": blob.digest, "size": blob.size, "ports": list(ports), "token": token}
        argv, stdin = program_call(python, host_programs("listen", "program", "relay"), request)
        self._session: Session = remote.open(argv)
        try:
            self._session.write(stdin)
            reply = self._reply(_REPLY_TIMEOUT_S, replies.RelayState)
        except BaseException:
            self.close()
            raise
        self.have = reply["have"]
        self.port = reply["port"]

    def get(self, source: tuple[str, int | None] | None) -> None:
        """Have the host receive the blob. Raises HostUnreachable, RemoteError if it did not, SnapshotError."""
        self._session.write(json.dumps({"from": source}).encode() + b"\n")
        if source is None:
            send_blob(self._session, self._blob, "the code")
        problem = self._reply(TRANSFER_S, replies.RelayResult)["error"]
        if problem is not None:
            raise RemoteError(self._name, one_line(problem))

    def close(self) -> None:
        with contextlib.suppress(SchedulerError):
            self._session.close()

    def _reply(self, timeout_s: float, kind: type[T]) -> T:
        return replies.decode(read_reply(self._session, timeout_s, self._name, self._python), kind, self._name)
