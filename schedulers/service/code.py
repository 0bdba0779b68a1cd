"""Upload of a job's code to a server, in pieces; an upload that was cut off is continued."""

from __future__ import annotations

import os

from ..errors import SchedulerError, UnknownJob
from ..store.snapshot import Snapshot
from .client import Client, Refused

PIECE_BYTES = 1 << 20  # the limit of nginx's default configuration
_SMALL_BYTES = 1 << 16
_CONFLICT = 409
_MAX_CONFLICTS = 3


def send_code(client: Client, snapshot: Snapshot) -> None:
    """Send the snapshot, unless the server has it from this user. Raises what a request raises, and OSError."""
    path = f"/code/{snapshot.digest}"
    conflicts = 0
    is_small = os.path.exists(snapshot.path) and os.path.getsize(snapshot.path) <= _SMALL_BYTES
    offset = 0 if is_small else _offset(client, path)  # sending a little again is as fast as asking
    if offset is None:
        return
    size = os.path.getsize(snapshot.path)
    with open(snapshot.path, "rb") as file:
        while offset is not None:
            file.seek(offset)
            headers = {"Accel-Offset": str(offset), "Accel-Size": str(size)}
            piece = file.read(PIECE_BYTES)
            try:
                answer = client.request("PATCH", path, data=piece, headers=headers)
            except Refused as error:
                # A repeated request whose first answer was lost, or another client of the same user.
                conflicts += 1
                if error.status != _CONFLICT or conflicts > _MAX_CONFLICTS:
                    raise
                offset = _offset(client, path)
                continue
            if answer.status == 201:
                return
            offset += len(piece)
            if offset >= size:
                raise SchedulerError(f"{client.server.name}: the server has all of the code and does not accept it")


def _offset(client: Client, path: str) -> int | None:
    """Return where the upload continues; None if it is complete."""
    try:
        headers = client.request("HEAD", path).headers
    except UnknownJob:
        return 0
    return None if headers.get("Accel-Complete") == "true" else int(headers["Accel-Offset"])
