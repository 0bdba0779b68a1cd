"""What a local job keeps in its directory beside the store's own files.

local/settings.json     the supervisor's instructions, as planned
local/supervisor.json   the supervisor's identity, with its node, boot and PID namespace
local/launcher.json     that of `accel launch`
local/supervisor.lock   locked for as long as the supervisor lives
local/progress.json     what the supervisor is doing, for people: waiting for what, running since when
exit.json               how it ended: written once, whole or not at all
logs/                   see `schedulers.store.log_lines`; and launch.jsonl, in which `accel launch` tells of attempts
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..convert import as_text, parse_json
from ..errors import StoreError
from ..job import Reason, State, Status
from ..node.logs import newest_attempt, newest_event
from ..processes import Identity, Place
from ..store import atomic_files
from ..store.record import read_record

T = TypeVar("T")

SCHEMA = 1


class JobFiles:
    """The files of one job. Reading gives None for what is not there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"

    def write(self, name: str, text: str) -> None:
        """Writes a file whole: a reader sees the old text or the new."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def read(self, name: str) -> str | None:
        try:
            return (self.directory / name).read_text(errors="replace")
        except FileNotFoundError:
            return None

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads((self.directory / "local/settings.json").read_text())
        return settings

    def supervisor(self) -> Identity | None:
        return self._identity("supervisor")

    def launcher(self) -> Identity | None:
        return self._identity("launcher")

    def set_identity(self, who: str, identity: Identity) -> None:
        """Records which process of this place is the job's `supervisor` or `launcher`."""
        self.write(f"local/{who}.json", json.dumps(identity_document(identity)))

    def progress(self) -> Status:
        """What the live supervisor last said, with the attempt that the launcher is at."""
        import time

        asked_at = time.time()  # what is written while it is read is newer
        status = self._decoded("local/progress.json", Status.from_json) or Status(state=State.QUEUED)
        return dataclasses.replace(status, attempt=self.attempt(), observed_at=asked_at)

    def exit(self) -> Status | None:
        """How the job ended. A result that cannot be read is a result: the job has ended, and how is lost."""
        try:
            document = atomic_files.read_document(str(self.directory / "exit.json"))
            return None if document is None else Status.from_json(document)
        except (StoreError, ValueError) as error:
            return Status(state=State.FAILED, reason=Reason.LOST, message=f"its result cannot be read: {error}")

    def launch_event(self, *names: str) -> dict[str, Any] | None:
        """The last event of one of these names that `accel launch` wrote."""
        return newest_event(str(self.logs / "launch.jsonl"), *names)

    def attempt(self) -> int:
        return newest_attempt(str(self.logs / "launch.jsonl")) or 0

    def failure(self) -> dict[str, Any] | None:
        """The last failure that the launcher reported."""
        event = self.launch_event("failure")
        return None if event is None else event.get("failure")

    def in_use(self) -> str:
        """Return why the job may still run although its record has a final state, for a message; else ''."""
        if self.exit() is not None:
            return ""
        for identify in (self.supervisor, self.launcher):
            with contextlib.suppress(StoreError):  # damaged: the lock tells
                identity = identify()
                where = "" if identity is None else identity.hidden()
                if where:
                    return f"it may still run on {where}"
                if identity is not None and identity.alive():
                    return "it still runs"
        return "it still runs" if self._supervised() else ""

    def _supervised(self) -> bool:
        """Return True when the supervisor's lock is held: by a process of any PID namespace of this node."""
        try:
            with open(self.directory / "local/supervisor.lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _identity(self, who: str) -> Identity | None:
        """Read a process. A record of an older version has no place: the node of the submit stands for it.

        Raises StoreError when the file is damaged.
        """

        def decode(document: dict[str, Any]) -> Identity:
            identity = Identity.parse(as_text(document["process"], who))
            place = (as_text(document.get(key, ""), key) for key in ("node", "boot", "pid_namespace"))
            return dataclasses.replace(identity, place=Place(*place))

        identity = self._decoded(f"local/{who}.json", decode)
        if identity is None or (identity.place is not None and identity.place.node):
            return identity
        place = Place(read_record(self.directory.name, str(self.directory)).submitter[0])
        return dataclasses.replace(identity, place=place)

    def _decoded(self, name: str, decode: Callable[[dict[str, Any]], T]) -> T | None:
        """What `decode` makes of the JSON object in the file; None when there is none. Raises StoreError."""
        text = self.read(name)
        if not text:
            return None
        try:
            document = parse_json(text)
            return decode(document if isinstance(document, dict) else {})
        except (ValueError, KeyError) as error:
            raise StoreError(f"{self.directory / name} is damaged: {error}") from None


def identity_document(identity: Identity) -> dict[str, Any]:
    """The content of local/supervisor.json and local/launcher.json, for a process of this place."""
    return {"schema": SCHEMA, "process": str(identity), **dataclasses.asdict(Place.here())}


def progress_document(status: Status) -> dict[str, Any]:
    """The content of local/progress.json."""
    return {"schema": SCHEMA, **status.to_json()}
