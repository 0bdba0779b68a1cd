"""`Record`: a job in the store. Its directory has spec.json, plan.json, events.jsonl, exit.json, logs/."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..convert import as_integer, as_text, as_timestamp, parse_json
from ..errors import SchedulerError, StoreError
from ..job import JobSpec, State, Status
from ..processes import boot_id, pid_namespace, space_of
from . import atomic_files

if TYPE_CHECKING:
    from pathlib import Path

    from ..target import Plan

# The order of states within an attempt: an answer older than the current status cannot move the job back.
_ORDER = {State.SUBMITTING: 0, State.QUEUED: 1, State.RUNNING: 2, State.UNKNOWN: 1}
_ADOPTED = "adopted"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of events.jsonl: `submitting`, `status`, or a note under another name, and when it was written."""

    name: str
    at: float
    data: Mapping[str, Any]


class _JobDirectory:
    path: str

    @property
    def directory(self) -> Path:
        """The job's directory."""
        from pathlib import Path

        return Path(self.path)


@dataclass(frozen=True, kw_only=True)
class CorruptRecord(_JobDirectory):
    """A job that cannot be read: damaged, or written by a newer accel. Its files are left as they are."""

    id: str
    path: str
    reason: str


@dataclass(kw_only=True)
class Record(_JobDirectory):
    """One job as the store last read it; `reload` and every change read it again.

    ended_at:       when the final state was written; None before.
    absent_since:   when the backend first did not know the job; None while it does.
    submitter:      (host, process id) that wrote the intent.
    submitted_from: the scope of that process id (`pid_space`).
    backend:        the identity of the backend that has the job (`target.Identifies`); "" while it is unknown.
    adopted:        another machine submitted the job, and it was found on its target.
    cancel_requested: a cancel of the job was requested through accel.
    incomplete:     the submit is not complete: the target has not confirmed all of the job, or the cancel of it.
    warning:        why `status` may be old; never stored.
    owner:          the user who submitted a job that its target has listed, where jobs have one; never stored.
    """

    id: str
    path: str
    name: str
    target: str
    kind: str
    nodes: int
    procs: int | None = None
    created_at: float
    submitter: tuple[str, int] = ("", 0)
    submitted_from: str = ""
    after: tuple[str, ...] = ()
    native_id: str | None
    status: Status
    started_at: float | None = None
    ended_at: float | None = None
    absent_since: float | None = None
    backend: str = ""
    adopted: bool = False
    cancel_requested: bool = False
    incomplete: bool = False
    warning: str = ""
    owner: str = ""

    def spec(self) -> JobSpec:
        """Return the submitted spec. Raises StoreError if spec.json is missing, damaged or newer."""
        return self._typed("spec.json", "spec", JobSpec.from_json)

    def plan(self) -> Plan:
        """Return the plan that was submitted. Raises StoreError if plan.json is missing, damaged or newer."""
        from ..target import Plan

        return self._typed("plan.json", "plan", Plan.from_json)

    def options(self) -> dict[str, Any] | None:
        """Return the target's options as they were at the submit; None if they were not stored."""
        path = f"{self.path}/target.json"
        document = atomic_files.read_document(path)
        if document is None:
            return None
        options = document.get("options", {})
        if not isinstance(options, dict):
            raise StoreError(f"{path} is damaged: its options are not a JSON object")
        return options

    def events(self) -> list[Event]:
        """Return all events of the job, oldest first. Raises StoreError."""
        rows = _rows(self.path)
        from_rows(self.id, self.path, rows)  # validates the lines: each has a name and a time
        reserved = ("schema", "event", "at", "torn_before")
        return [
            Event(name=row["event"], at=row["at"], data={key: row[key] for key in row if key not in reserved})
            for row in rows
        ]

    def append(self, name: str, **data: Any) -> None:
        """Append a note to events.jsonl; the status stays. Raises StoreError if it is not on disk."""
        if name in ("submitting", "status", _ADOPTED):
            raise ValueError(f"{name} is an event of the store's own; use update()")
        self._append(lambda: {"event": name, "at": time.time(), **data})

    def identify(self, backend: str) -> None:
        """Record the identity of the backend that has the job, unless one is recorded. Raises StoreError."""
        row = {"event": "backend", "at": time.time(), "backend": backend}
        self._append(lambda: None if self.backend else row, durably=False)  # it can be queried again

    def update(self, status: Status, native_id: str | None = None, *, incomplete: bool = False) -> Status:
        """Record a backend's answer and return the status in force.

        It differs from `status` if the change is not allowed: a final state never changes, and an older answer never
        moves a job back within an attempt. With a native id, `incomplete` is stored: the submit must still be
        completed; without one, the stored value stays. Many processes may call this at once. A change only in texts or
        `observed_at` is stored without an event, and takes no lock. Raises StoreError.
        """
        try:
            status = Status.from_json(status.to_json())
        except ValueError as error:  # nothing is written that could not be read again
            raise StoreError(f"job {self.id}: its target returned an invalid status: {error}") from None
        status = status if status.observed_at else dataclasses.replace(status, observed_at=time.time())

        def decide() -> dict[str, Any] | None:
            new = _succession(self.status, status)
            native = native_id or self.native_id
            still_incomplete = self.incomplete if native_id is None else incomplete
            if _same_state(new, self.status) and (native, still_incomplete) == (self.native_id, self.incomplete):
                return None
            row = {"event": "status", "at": time.time(), "status": new.to_json(), "native_id": native}
            return row | ({"incomplete": True} if still_incomplete and native is not None else {})

        # A status that can be polled again need not survive a crash: an fsync per job would be slow.
        durably = status.state.final or native_id is not None
        appended = False
        if native_id is not None or not _same_state(_succession(self.status, status), self.status):
            appended = self._append(decide, durably=durably)
        if not appended and _same_state(status, self.status) and not self.status.state.final:
            self._write_seen(status)
        return self.status

    def reload(self) -> Record:
        """Read the job again and return this record. Raises StoreError."""
        self._read(_rows(self.path))
        return self

    def read_exit(self) -> dict[str, Any] | None:
        """Return the result that the job has left, or None. Raises StoreError if it is damaged or newer."""
        return atomic_files.read_document(f"{self.path}/exit.json")

    @contextlib.contextmanager
    def submission(self, *, blocking: bool = True) -> Iterator[bool]:
        """Hold the lock of the job's submit. Yields False if another process holds it and `blocking` is off."""
        with atomic_files.exclusive_lock(f"{self.path}/submit.lock", blocking=blocking) as acquired:
            yield acquired

    def _append(self, decide: Callable[[], Mapping[str, Any] | None], *, durably: bool = True) -> bool:
        """Read the job again and append the event that `decide` returns, with no other writer in between.

        Returns True if there is one. Raises StoreError if the record is invalid or cannot be written.
        """

        def read_and_decide(rows: list[dict[str, Any]]) -> Mapping[str, Any] | None:
            self._read(rows)
            return decide()

        rows, appended = atomic_files.append_line(f"{self.path}/events.jsonl", read_and_decide, durably=durably)
        if appended:
            self._read(rows)
        return appended

    def _typed(self, file: str, key: str, convert: Callable[[object], T]) -> T:
        path = f"{self.path}/{file}"
        document = atomic_files.read_document(path)
        if document is None:
            raise StoreError(f"{path} is missing")
        try:
            return convert(document.get(key))
        except SchedulerError as error:
            raise StoreError(f"{path} is damaged: {error}") from None

    def _read(self, rows: list[dict[str, Any]]) -> None:
        # Updated in place, so that a Job, and every other holder of this record, sees the change.
        fresh = from_rows(self.id, self.path, rows)
        for name, value in fresh.__dict__.items():
            if name != "warning":
                setattr(self, name, value)

    def _write_seen(self, status: Status) -> None:
        """Store an answer that changes at most texts in the file `seen`, whose time is the answer's.

        A waiter that polls all week, or a queue that moves a thousand times, thus does not fill events.jsonl.
        """
        observed_at, unchanged = status.observed_at, _is_same_status(status, self.status)
        if observed_at < self.status.observed_at or (unchanged and observed_at == self.status.observed_at):
            return
        path = f"{self.path}/seen"
        with contextlib.suppress(OSError):
            if unchanged:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            else:
                atomic_files.replace_file(
                    path, atomic_files.encode({"schema": atomic_files.SCHEMA, **status.to_json()}, path)
                )
            os.utime(path, (observed_at, observed_at))
        self.status = status


def read_record(job_id: str, path: str) -> Record:
    """Read the job in the directory `path` from events.jsonl alone. Raises StoreError."""
    return from_rows(job_id, path, _rows(path))


def from_rows(job_id: str, path: str, rows: list[dict[str, Any]]) -> Record:
    """Build the record from the lines of events.jsonl. Raises StoreError for invalid ones."""
    try:
        return _fold(job_id, path, rows)
    except (KeyError, ValueError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise StoreError(f"{path}/events.jsonl is damaged: {problem}") from None


def _rows(path: str) -> list[dict[str, Any]]:
    events = f"{path}/events.jsonl"
    raw = atomic_files.read_bytes(events)
    if raw is None:
        raise StoreError(f"{events} is missing")
    return atomic_files.parse_lines(raw, events)[0]


def _fold(job_id: str, path: str, rows: list[dict[str, Any]]) -> Record:
    if not rows:
        raise StoreError(f"{path}/events.jsonl is damaged: it holds no record")
    first, last = rows[0], rows[0]
    started = ended = absent = None
    cancel_requested, backend = False, ""
    status = Status.from_json(first["status"])
    for row in rows:
        event, timestamp = as_text(row["event"], "event"), as_timestamp(row["at"], "at")
        backend = backend or as_text(row.get("backend", ""), "backend")
        if event == "absent":
            absent = timestamp if absent is None else absent
        elif event == "present":
            absent = None
        elif event == "cancel":
            cancel_requested = True
        elif "status" in row:
            last, absent = row, None
            status = Status.from_json(row["status"])
            if status.state is State.RUNNING and started is None:
                started = timestamp
            elif status.state.final:
                ended = timestamp
    procs, native_id, after = first.get("procs"), last.get("native_id"), first.get("after", [])
    if not isinstance(after, list):
        raise ValueError("after is not a list")
    return Record(
        id=job_id,
        path=path,
        name=as_text(first["name"], "name"),
        target=as_text(first["target"], "target"),
        kind=as_text(first["kind"], "kind"),
        nodes=as_integer(first["nodes"], "nodes", least=1),
        procs=None if procs is None else as_integer(procs, "procs", least=1),
        created_at=as_timestamp(first["created_at"], "created_at"),
        submitter=(as_text(first["host"], "host"), as_integer(first["pid"], "pid", least=1)),
        submitted_from=space_of(*(as_text(first.get(key, ""), key) for key in ("boot", "host", "pid_namespace"))),
        after=tuple(as_text(job_id, "after") for job_id in after),
        native_id=None if native_id is None else as_text(native_id, "native_id"),
        status=_with_seen(path, status),
        started_at=started,
        ended_at=ended,
        absent_since=absent,
        backend=backend,
        adopted=first["event"] == _ADOPTED,
        cancel_requested=cancel_requested,
        incomplete=native_id is None or last.get("incomplete") is True,
    )


def _with_seen(path: str, status: Status) -> Status:
    """Return the status with the texts and time of the newest answer in the file `seen`, if its state is the same.

    An invalid time is ignored.
    """
    if status.state.final:
        return status
    try:
        info = os.stat(f"{path}/seen")
        seen = as_timestamp(info.st_mtime, "seen")
        raw = atomic_files.read_bytes(f"{path}/seen") if info.st_size else None
    except (OSError, StoreError, ValueError):
        return status
    with contextlib.suppress(ValueError):
        seen_status = Status.from_json(parse_json(raw)) if raw else status
        if seen_status.observed_at >= status.observed_at and _same_state(seen_status, status):
            status = seen_status
    return dataclasses.replace(status, observed_at=seen) if seen > status.observed_at else status


def _is_same_status(status: Status, other: Status) -> bool:
    return dataclasses.replace(status, observed_at=0.0) == dataclasses.replace(other, observed_at=0.0)


def _same_state(status: Status, other: Status) -> bool:
    """Return True if the two differ at most in their texts; those of a final status must be equal too."""
    if status.state.final:
        return _is_same_status(status, other)
    wording: dict[str, Any] = {name: getattr(other, name) for name in ("message", "native_state", "details")}
    return _is_same_status(dataclasses.replace(status, **wording), other)


def _succession(current: Status, new: Status) -> Status:
    if not current.state.may_become(new.state) or current.state.final:
        return current
    if new.state.final:
        # A target that has lost the job does not know how often it was started.
        return dataclasses.replace(new, attempt=max(new.attempt, current.attempt))
    if new.attempt < current.attempt:
        return current
    regressed = new.attempt == current.attempt and _ORDER[new.state] < _ORDER[current.state]
    return current if regressed and new.observed_at < current.observed_at else new


def first_row(
    spec: JobSpec, *, target: str, kind: str, backend: str, native_id: str | None, created_at: float | None
) -> dict[str, Any]:
    """Return the first line of events.jsonl: the intent, and everything that a list shows.

    With a native id, another machine submitted the job at `created_at`, and its state is not known yet.
    """
    now = time.time()
    status = Status(state=State.SUBMITTING, observed_at=now)
    if native_id is not None:
        status = Status(state=State.QUEUED, message="found on its target, not polled yet")
    return {
        "event": "submitting" if native_id is None else _ADOPTED,
        "at": now,
        "name": spec.name,
        "target": target,
        "kind": kind,
        "nodes": spec.nodes,
        "procs": spec.procs_per_node,
        "after": list(spec.after),
        "created_at": now if created_at is None else created_at,
        "host": os.uname().nodename,
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "status": status.to_json(),
        "native_id": native_id,
        **({"backend": backend} if backend else {}),
    }
