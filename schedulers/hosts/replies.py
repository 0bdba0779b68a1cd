"""Replies of the programs that run on hosts: a line of JSON, validated against a type before use.

A host's reply is not trusted: a start-up file may print first, a disk may be damaged, a program may be
another version. A reply of another type is a RemoteError of that host alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec

from ..convert import convert, parse_json
from ..errors import Unreachable
from .errors import RemoteError, one_line

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Status(TypedDict):
    """A job's status from `node/jobs.py`. `state` and `exit` are the contents of files, damaged ones too."""

    known: bool
    alive: bool
    state: Any
    exit: Any


class LogFile(TypedDict):
    name: str
    rank: Count | None
    attempt: Count
    offset: Count
    length: Count
    size: Count


class Logs(TypedDict):
    files: list[LogFile]
    complete: bool
    over: bool


class LogEnd(TypedDict):
    """The number of a log's last lines, and where they begin."""

    name: str
    rank: Count | None
    attempt: Count
    lines: Count
    begin: Count


class Settings(TypedDict):
    settings: dict[str, Any]
    started: bool


class SlurmQueueEntry(TypedDict):
    state: str
    reason: str
    code: str
    derived: str
    restarts: Count


class SlurmJob(TypedDict):
    exit: Any
    said: SlurmQueueEntry | None
    searched: bool
    attempt: Count
    started: bool
    foreign: bool
    words: str


class SlurmStatus(TypedDict):
    jobs: list[SlurmJob]
    unreachable: str | None
    accounting: bool
    age_s: Seconds


class SlurmFound(TypedDict):
    spec: dict[str, Any]
    slurm: str | None


class SlurmSubmitted(TypedDict):
    slurm: str


class SlurmAbout(TypedDict):
    root: str
    home: str


class SlurmCluster(TypedDict):
    name: str
    max_array_size: int | None


class SlurmCheck(TypedDict):
    version: str
    accounting: bool | str
    root: str | None
    partitions: list[list[str]]


# Operation -> type of its reply: of `node/jobs.py`, and of Slurm's login node.
JOBS: Mapping[str, Any] = {
    "status": Status,
    "find": Settings | None,
    "logs": Logs,
    "at": dict[str, Count],
    "tail": list[LogEnd],
    "start": dict[str, str],
    "port": Count | None,
    "claim": bool,
    "clear": list[int],
    "cancel": bool,
    "id": str,
}
SLURM: Mapping[str, Any] = {
    "status": SlurmStatus,
    "find": SlurmFound | None,
    "cancel": str,
    "running": dict[str, str],
    "clear": dict[str, str],
    "logs": Logs,
    "at": dict[str, Count],
    "tail": list[LogEnd],
    "about": SlurmAbout,
    "cluster": SlurmCluster,
    "check": SlurmCheck,
}


class Need(TypedDict):
    """`node/files.py`: True if the blob must be sent."""

    need: bool


class OperationDone(TypedDict):
    done: list[Any]


class CleanupResult(TypedDict):
    """`node/cleanup.py`: job -> why it was left."""

    kept: dict[str, str]


class VenvResult(TypedDict):
    """`node/venv.py`: the environment's interpreter, and True if it was created now."""

    python: str | None
    made: bool


class RelayState(TypedDict):
    """`node/relay.py`, at its start."""

    have: bool
    port: Count | None


class Port(TypedDict):
    """`node/probe.py`, for `listen`."""

    port: Count


class ReachResult(TypedDict):
    """`node/probe.py`, for `connect`: for each listening host, address -> None or why it was not reached."""

    reached: list[dict[str, str | None]]


class RelayResult(TypedDict):
    """`node/relay.py`, when it has received the blob or failed."""

    error: str | None


def decode(line: bytes | str, kind: type[T], host: str, stderr: bytes = b"") -> T:
    """Validate the reply as a `kind`, without unknown keys.

    Raises RemoteError for `{"error": …}`, unless a `kind` has that key, and for anything that is not a `kind`;
    Unreachable for `{"error": …, "unreachable": true}`.
    """
    try:
        reply = parse_json(line)
    except ValueError:
        raise RemoteError(host, f"its reply is not JSON: {one_line(line or stderr)}") from None
    if isinstance(reply, dict) and "error" in reply and "error" not in kind.__annotations__:
        text = one_line(str(reply["error"]))
        raise Unreachable(f"{host}: {text}") if reply.get("unreachable") is True else RemoteError(host, text)
    return _converted(reply, kind, host)


def decode_done(
    line: bytes | str, steps: Sequence[Mapping[str, Any]], kinds: Mapping[str, Any], host: str, stderr: bytes = b""
) -> list[Any]:
    """Return the reply to each step, of the type that `kinds` has for its operation. Raises as `decode`."""
    done = decode(line, OperationDone, host, stderr)["done"]
    if len(done) != len(steps):
        raise RemoteError(host, f"its reply has {len(done)} results for {len(steps)} requests")
    return [_converted(value, kinds[step["op"]], host) for step, value in zip(steps, done, strict=True)]


def _converted(value: Any, kind: type[T], host: str) -> T:
    try:
        return convert(value, kind)
    except ValueError as error:
        raise RemoteError(host, f"its reply is malformed: {one_line(str(error))}") from None
