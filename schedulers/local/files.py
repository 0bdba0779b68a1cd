"""What a local job keeps in its directory beside the store's own files.

local/settings.json     the supervisor's instructions, as planned
local/supervisor.json   the supervisor's identity
local/launcher.json     the identity of `accel launch`
local/progress.json     what the supervisor is doing, for people: waiting for what, running since when
exit.json               how it ended: written once, whole or not at all
logs/                   see `schedulers.logfiles`; and launch.jsonl, in which `accel launch` tells of attempts
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import disk
from ..converting import as_text, parse_json
from ..errors import StoreError
from ..job import Reason, State, Status
from ..processes import Identity
from ..remote.hostside.logs import newest_attempt, newest_event

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
        """Notes which process is the job's `supervisor` or `launcher`."""
        self.write(f"local/{who}.json", json.dumps({"schema": SCHEMA, "process": str(identity)}))

    def progress(self) -> Status:
        """What the live supervisor last said, with the attempt that the launcher is at."""
        import dataclasses
        import time

        asked_at = time.time()  # what is written while it is read is newer
        status = self._decoded("local/progress.json", Status.from_json) or Status(state=State.QUEUED)
        return dataclasses.replace(status, attempt=self.attempt(), observed_at=asked_at)

    def set_progress(self, status: Status) -> None:
        self.write("local/progress.json", json.dumps({"schema": SCHEMA, **status.to_json()}))

    def exit(self) -> Status | None:
        """How the job ended. A result that cannot be read is a result: the job has ended, and how is lost."""
        try:
            document = disk.read_document(str(self.directory / "exit.json"))
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

    def _identity(self, who: str) -> Identity | None:
        return self._decoded(f"local/{who}.json", lambda document: Identity.parse(as_text(document["process"], who)))

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
