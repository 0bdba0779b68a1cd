"""The user's public key in a slice's metadata, from where the workers' guest agent takes it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from ..hosts.errors import LoginRefused
from ..hosts.host_list import Host
from ..hosts.transport import Pool
from .api import Api

_KEYS = "ssh-keys"
_TAKEN_S = 60.0  # by then the guest agent has put it in place
_AGAIN_S = 1.0
progress = logging.getLogger("schedulers.progress")


def let_in(api: Api, node: Any, pool: Pool, host: Host) -> None:
    """Has the key of whoever submits in the node's metadata, and returns when the worker takes it.

    Nothing is done where it takes a key already, or there is no public key in a file: then logging in tells why not.
    """
    try:
        pool.connection(host)
        return
    except LoginRefused as error:
        line = _line(pool, host)
        listed = str(node.metadata.get(_KEYS, ""))
        if line is None or line in listed.splitlines():
            raise error
    progress.info("giving %s your public key", api.where.replace("target", "the slice of target"))
    api.set_metadata(node, {**node.metadata, _KEYS: "\n".join(filter(None, (listed.rstrip("\n"), line)))})
    deadline = time.monotonic() + _TAKEN_S
    while True:
        try:
            pool.connection(host)
            return
        except LoginRefused:
            if time.monotonic() > deadline:
                raise
        time.sleep(_AGAIN_S)


def _line(pool: Pool, host: Host) -> str | None:
    """`user:key`, of the first key that SSH would try and whose public half is in a file."""
    settings = pool.settings(host)
    for path in settings.identities:
        try:
            text = Path(f"{path}.pub").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        return f"{settings.user}:{text.strip()}"
    return None
