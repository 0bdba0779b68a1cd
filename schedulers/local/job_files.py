"""Files of a local job in its directory, in addition to the store's own.

local/settings.json     the supervisor's instructions, as planned
local/supervisor.json   the supervisor's identity, node and PID namespace; written once its lock is held
local/supervisor.lock   locked while the supervisor or the launcher lives, the only proof that the job runs
local/cancel            a cancel request, from where the supervisor cannot be signalled
local/progress.json     the supervisor's progress, for people: waiting for what, running since when
exit.json               the result: written once, completely or not at all
logs/                   see `schedulers.store.log_lines`; launch.jsonl: `accel launch`'s events of attempts
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..convert import as_text, parse_json
from ..errors import StoreError, Unreachable
from ..job import Reason, State, Status
from ..node.logs import newest_attempt, newest_event
from ..processes import Identity, pid_namespace
from ..store import atomic_files

T = TypeVar("T")

SCHEMA = 1

# File systems of one machine, by the magic numbers of statfs(2): btrfs, ext, f2fs, overlay, tmpfs, XFS, ZFS.
DISKS = {0x9123683E, 0xEF53, 0xF2F52010, 0x794C7630, 0x01021994, 0x58465342, 0x2FC12FC1}


class JobFiles:
    """The files of one job. Reading a missing one returns None."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = directory / "logs"

    def write(self, name: str, text: str) -> None:
        """Write a file atomically: a reader sees the old text or the new."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_file(str(path), text.encode(), durably=True)

    def read(self, name: str) -> str | None:
        """Return a file's text, or None if it does not exist."""
        try:
            return (self.directory / name).read_text(errors="replace")
        except FileNotFoundError:
            return None

    def settings(self) -> dict[str, Any]:
        """Return the settings that the job was submitted with."""
        settings: dict[str, Any] = json.loads((self.directory / "local/settings.json").read_text())
        return settings

    def supervisor(self) -> Identity | None:
        """Return the job's supervisor, which may run elsewhere. Raises StoreError if its file is damaged."""

        def decode(document: dict[str, Any]) -> Identity:
            identity = Identity.parse(as_text(document["process"], "supervisor"))
            return dataclasses.replace(identity, namespace=as_text(document.get("pid_namespace", ""), "namespace"))

        return self._decoded("local/supervisor.json", decode)

    def set_supervisor(self, identity: Identity) -> None:
        """Record that this process of this machine is the job's supervisor. It must hold the lock."""
        machine = {"node": os.uname().nodename, "pid_namespace": pid_namespace()}
        self.write("local/supervisor.json", json.dumps({"schema": SCHEMA, "process": str(identity), **machine}))

    def supervised(self) -> bool | None:
        """Return True while the supervisor or the launcher lives, on any machine; None before there is one.

        The lock decides, once the supervisor has written its file: from then on it is held, so no reader takes it
        first. A free lock is proof on the supervisor's own boot, and after it if no other machine has the file
        system. Raises Unreachable if it is no proof, and StoreError if the supervisor's file is damaged.
        """
        if not (self.directory / "local/supervisor.json").exists():
            return None
        path = self.directory / "local/supervisor.lock"
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise Unreachable(self._unknown(f"its lock cannot be tested ({error.strerror})")) from None
        supervisor = self.supervisor()
        if supervisor is None or supervisor.same_boot() or on_disk_of_this_machine(path):
            return False
        raise Unreachable(self._unknown("its lock is free, but this machine may not see the locks of others"))

    def _unknown(self, reason: str) -> str:
        """Return the message for a job that may run on another machine, with the command that ends it here."""
        node = self._decoded("local/supervisor.json", lambda document: str(document.get("node", ""))) or "another node"
        name = shlex.quote(f"{self.directory}/local/supervisor.json")
        return f"job {self.directory.name} may still run on {node}: {reason}. If that machine is gone: rm {name}"

    def progress(self) -> Status:
        """Return the live supervisor's last status, with the launcher's current attempt."""
        read_at = time.time()  # what is written while it is read is newer
        status = self._decoded("local/progress.json", Status.from_json) or Status(state=State.QUEUED)
        return dataclasses.replace(status, attempt=self.attempt(), observed_at=read_at)

    def exit(self) -> Status | None:
        """Return the final status, or None. An unreadable result becomes a failed status: the job has ended."""
        try:
            document = atomic_files.read_document(str(self.directory / "exit.json"))
            return None if document is None else Status.from_json(document)
        except (StoreError, ValueError) as error:
            return Status(state=State.FAILED, reason=Reason.LOST, message=f"its result cannot be read: {error}")

    def launch_event(self, *names: str) -> dict[str, Any] | None:
        """Return the last event of one of these names that `accel launch` wrote."""
        return newest_event(str(self.logs / "launch.jsonl"), *names)

    def attempt(self) -> int:
        """Return the number of the latest attempt, from 0."""
        return newest_attempt(str(self.logs / "launch.jsonl")) or 0

    def failure(self) -> dict[str, Any] | None:
        """Return the last failure that the launcher reported."""
        event = self.launch_event("failure")
        return None if event is None else event.get("failure")

    def in_use(self) -> str:
        """Return why the job may still run although its record has a final state; else ''."""
        if self.exit() is not None:
            return ""
        try:
            return "it still runs" if self.supervised() else ""
        except Unreachable as error:
            return str(error)
        except StoreError:  # damaged, and its lock is free
            return ""

    def _decoded(self, name: str, decode: Callable[[dict[str, Any]], T]) -> T | None:
        """Return the JSON object of the file, decoded by `decode`; None if there is no file. Raises StoreError."""
        text = self.read(name)
        if not text:
            return None
        try:
            document = parse_json(text)
            return decode(document if isinstance(document, dict) else {})
        except (ValueError, KeyError) as error:
            raise StoreError(f"{self.directory / name} is damaged: {error}") from None


def on_disk_of_this_machine(path: Path) -> bool:
    """Return True for a file system that no other machine can have mounted meanwhile, by statfs(2)."""
    if sys.platform != "linux":
        return False
    import ctypes  # not needed to submit

    buffer = ctypes.create_string_buffer(1024)  # struct statfs, of at most 120 bytes; it begins with the type
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF in DISKS
