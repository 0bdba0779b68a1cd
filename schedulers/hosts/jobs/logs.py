"""A job's log lines from all of its hosts: byte-exact, from a cursor, none lost, doubled or cut."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import SchedulerError, Unreachable
from ...job import Cursor, LogLine
from ...node.logs import order
from ...store import log_lines
from ..host_list import Host
from .native_id import Native
from .status import Hosts

# Bytes of one log, of all logs of a host, and of all hosts, that are read at once. A log gives a line or a piece of
# one for each logfiles.MOST_BYTES.
_LIMIT, _MAX_BYTES, _MAX_TOTAL_BYTES = 4 << 20, 16 << 20, 64 << 20
_UNREACHABLE = "unreachable"
_SINCE = "since"  # of a host that could not be asked where its logs stood at a time: that time

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of one log file, which cursors know as its `source`: the host's place in the native id, and its name."""

    source: str
    rank: int | None
    attempt: int
    offset: int
    data: bytes
    ends: bool  # it reaches to the end of a file that nobody writes to any more
    has_more: bool

    @property
    def order(self) -> tuple[float, int, str]:
        return order(self.source, self.rank, self.attempt)


def read(hosts: Hosts, native: Native, since: Cursor | None) -> Iterator[LogLine]:
    """The lines that there are now. A host that cannot be asked does not hold up the others' lines.

    Raises Unreachable, when the others' lines were given, for a job that may go on; of one that is over, the host's
    silence is one line of the launcher's, said once.
    """
    positions = _positions(since)
    numbers = {host: number for number, host in enumerate(native.hosts)}
    pending = list(native.hosts)
    max_bytes = max(log_lines.MAX_BYTES, min(_MAX_BYTES, _MAX_TOTAL_BYTES // len(native.hosts)))
    limits = {"limit": min(_LIMIT, max_bytes), "most": max_bytes}
    unread: dict[Host, list[str]] = {}
    errors: dict[Host, SchedulerError] = {}
    finished, believe_down = False, True
    while pending:
        steps = {host: [_step(native, positions, numbers[host]) | limits | _only(unread.get(host))] for host in pending}
        chunks: list[_Piece] = []
        unread = {}
        for host, outcome in hosts.query(steps, believe_down=believe_down).items():
            if outcome.error is not None or outcome.value is None:
                errors[host] = outcome.error or Unreachable(f"{host}: no answer")
                continue
            finished = finished or bool(outcome.value.done[0]["over"])
            host_chunks = _pieces(outcome.value.done[0], outcome.value.data, numbers[host])
            chunks += host_chunks
            unfinished = [chunk.source.partition("/")[2] for chunk in host_chunks if chunk.has_more]
            if unfinished:
                unread[host] = unfinished
        for chunk in sorted(chunks, key=lambda chunk: chunk.order):
            for line in _lines(chunk):
                positions[line.source] = line.position
                yield line
        pending = list(unread)
        if not pending and finished and believe_down:
            # They may be back; what they do not give now is missing for good.
            believe_down = False
            pending = [host for host in errors if f"{numbers[host]}/{_UNREACHABLE}" not in positions]
            for host in pending:
                del errors[host]
    yield from _unreachable_line(errors, numbers, positions, finished=finished)


def cursor_at(hosts: Hosts, native: Native, when: float) -> Cursor:
    """Where the logs stood; a host that cannot be asked now will be when its lines are read."""
    step = {"op": "at", "job": native.job_id, "when": when}
    positions: dict[str, str] = {}
    for number, outcome in enumerate(hosts.query({host: [step] for host in native.hosts}).values()):
        offsets = {_SINCE: when} if outcome.value is None else outcome.value.done[0]
        positions |= {f"{number}/{name}": str(offset) for name, offset in offsets.items()}
    return Cursor(positions)


def tail_at(hosts: Hosts, native: Native, since: Cursor, count: int) -> Cursor:
    """Where the last lines of each rank begin, whichever hosts its attempts were on; a host that cannot be asked now
    gives all lines later."""
    positions = _positions(since)
    steps = {
        host: {"op": "tail", "job": native.job_id, "from": _offsets(positions, number), "count": count}
        for number, host in enumerate(native.hosts)
    }

    def read_tails(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        tails = []
        requests = {
            host: [{**step, "counts": _positions_of_host(counts, number)}]
            for number, (host, step) in enumerate(steps.items())
        }
        for number, outcome in enumerate(hosts.query(requests, believe_down=True).values()):
            logs = [] if outcome.value is None else outcome.value.done[0]
            tails += [{**log, "name": f"{number}/{log['name']}"} for log in logs]
        return tails

    return since.moved(log_lines.last_lines(read_tails, count))


def _positions(since: Cursor | None) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
    return {source: position for source, _, position in pairs}


def _step(native: Native, positions: Mapping[str, str], number: int) -> dict[str, Any]:
    when = positions.get(f"{number}/{_SINCE}")
    since = {} if when is None else {"when": float(when)}
    return {"op": "logs", "job": native.job_id, "from": _offsets(positions, number), **since}


def _offsets(positions: Mapping[str, str], number: int) -> dict[str, int]:
    host_positions = _positions_of_host(positions, number)
    return {name: int(position) for name, position in host_positions.items() if position.isdigit() and name != _SINCE}


def _positions_of_host(by_source: Mapping[str, T], number: int) -> dict[str, T]:
    """Those of one host, by the names that it knows."""
    return {name.partition("/")[2]: value for name, value in by_source.items() if name.startswith(f"{number}/")}


def _only(logs: list[str] | None) -> dict[str, Any]:
    return {} if logs is None else {"only": logs}


def _pieces(done: Mapping[str, Any], data: bytes, number: int) -> list[_Piece]:
    chunks = []
    start = 0
    for file in done["files"]:
        end = file["offset"] + file["length"]
        chunks.append(
            _Piece(
                source=f"{number}/{file['name']}",
                rank=file["rank"],
                attempt=file["attempt"],
                offset=file["offset"],
                data=data[start : start + file["length"]],
                ends=done["complete"] and end >= file["size"],
                has_more=end < file["size"],
            )
        )
        start += file["length"]
    return chunks


def _lines(chunk: _Piece) -> Iterator[LogLine]:
    return log_lines.lines(
        io.BytesIO(chunk.data).read, chunk.ends,
        source=chunk.source, rank=chunk.rank, attempt=chunk.attempt, offset=chunk.offset,
    )  # fmt: skip


def _unreachable_line(
    errors: Mapping[Host, SchedulerError], numbers: Mapping[Host, int], positions: Mapping[str, str], *, finished: bool
) -> Iterator[LogLine]:
    if not errors:
        return
    if not finished:
        raise Unreachable(f"its logs cannot be read: {'; '.join(map(str, errors.values()))}")
    for host, error in errors.items():
        source = f"{numbers[host]}/{_UNREACHABLE}"
        if source not in positions:
            text = f"accel: its logs cannot be read: {error}\n"
            yield LogLine(rank=None, stream="missing", text=text, source=source, position="1")
