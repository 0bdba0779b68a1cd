"""The user's public key in a slice's metadata, from which the workers' guest agent installs it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..hosts.errors import LoginRefused
from ..hosts.host_list import Host
from ..hosts.transport import Pool
from .api import Api

_KEYS = "ssh-keys"
_KEY_ACCEPTED_S = 60.0  # for the guest agent to install it
_RETRY_S = 1.0
progress = logging.getLogger("schedulers.progress")


def install_key(api: Api, name: str, pool: Pool, hosts: Sequence[Host]) -> None:
    """Connect to a slice's workers. If one refuses the user's key, add it to the node's metadata and wait for all.

    Raises LoginRefused without a public key in a file, if the metadata has the key already, or if a worker still
    refuses it after 60 s. Ignores unreachable workers: the next login reports them.
    """
    refusals = _rejecting_hosts(pool, hosts)
    if not refusals:
        return
    node = api.node(name)
    host, error = next(iter(refusals.items()))
    line = _line(pool, host)
    ssh_keys = str(node.metadata.get(_KEYS, ""))
    if line is None or line in ssh_keys.splitlines():
        raise error
    progress.info("adding your public key to %s", api.label.replace("target", "the slice of target"))
    api.set_metadata(node, {**node.metadata, _KEYS: "\n".join(filter(None, (ssh_keys.rstrip("\n"), line)))})
    deadline = time.monotonic() + _KEY_ACCEPTED_S
    while refusals := _rejecting_hosts(pool, refusals):
        if time.monotonic() > deadline:
            raise error
        time.sleep(_RETRY_S)


def _rejecting_hosts(pool: Pool, hosts: Iterable[Host]) -> dict[Host, LoginRefused]:
    outcomes = pool.map(lambda remote: remote.connection(), hosts)
    return {outcome.host: outcome.error for outcome in outcomes if isinstance(outcome.error, LoginRefused)}


def _line(pool: Pool, host: Host) -> str | None:
    """Return `user:key` for the first key that SSH would try and whose public half is in a file, or None."""
    settings = pool.settings(host)
    for path in settings.identities:
        try:
            text = Path(f"{path}.pub").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return f"{settings.user}:{text.strip()}"
    return None
