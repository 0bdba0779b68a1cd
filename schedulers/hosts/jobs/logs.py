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
_LIMIT, _MOST, _MOST_OF_ALL = 4 << 20, 16 << 20, 64 << 20
_SILENT = "unreachable"
_WHEN = "since"  # of a host that could not be asked where its logs stood at a time: that time

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
    more: bool

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
    asked = list(native.hosts)
    most = max(log_lines.MOST_BYTES, min(_MOST, _MOST_OF_ALL // len(native.hosts)))
    limits = {"limit": min(_LIMIT, most), "most": most}
    unread: dict[Host, list[str]] = {}
    errors: dict[Host, SchedulerError] = {}
    over, believe = False, True
    while asked:
        steps = {host: [_step(native, positions, numbers[host]) | limits | _only(unread.get(host))] for host in asked}
        pieces: list[_Piece] = []
        unread = {}
        for host, outcome in hosts.ask(steps, believe_down=believe).items():
            if outcome.error is not None or outcome.value is None:
                errors[host] = outcome.error or Unreachable(f"{host}: no answer")
                continue
            over = over or bool(outcome.value.done[0]["over"])
            found = _pieces(outcome.value.done[0], outcome.value.data, numbers[host])
            pieces += found
            more = [piece.source.partition("/")[2] for piece in found if piece.more]
            if more:
                unread[host] = more
        for piece in sorted(pieces, key=lambda piece: piece.order):
            for line in _lines(piece):
                positions[line.source] = line.position
                yield line
        asked = list(unread)
        if not asked and over and believe:
            # They may be back; what they do not give now is missing for good.
            believe = False
            asked = [host for host in errors if f"{numbers[host]}/{_SILENT}" not in positions]
            for host in asked:
                del errors[host]
    yield from _of_silence(errors, numbers, positions, over=over)


def cursor_at(hosts: Hosts, native: Native, when: float) -> Cursor:
    """Where the logs stood; a host that cannot be asked now will be when its lines are read."""
    step = {"op": "at", "job": native.job_id, "when": when}
    found: dict[str, str] = {}
    for number, outcome in enumerate(hosts.ask({host: [step] for host in native.hosts}).values()):
        stood = {_WHEN: when} if outcome.value is None else outcome.value.done[0]
        found |= {f"{number}/{name}": str(place) for name, place in stood.items()}
    return Cursor(found)


def tail_at(hosts: Hosts, native: Native, since: Cursor, count: int) -> Cursor:
    """Where the last lines of each rank begin, whichever hosts its attempts were on; a host that cannot be asked now
    gives all lines later."""
    positions = _positions(since)
    steps = {
        host: {"op": "tail", "job": native.job_id, "from": _offsets(positions, number), "count": count}
        for number, host in enumerate(native.hosts)
    }

    def ask(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        found = []
        asked = {host: [{**step, "counts": _of(counts, number)}] for number, (host, step) in enumerate(steps.items())}
        for number, outcome in enumerate(hosts.ask(asked, believe_down=True).values()):
            logs = [] if outcome.value is None else outcome.value.done[0]
            found += [{**log, "name": f"{number}/{log['name']}"} for log in logs]
        return found

    return since.moved(log_lines.last_lines(ask, count))


def _positions(since: Cursor | None) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
    return {source: position for source, _, position in pairs}


def _step(native: Native, positions: Mapping[str, str], number: int) -> dict[str, Any]:
    when = positions.get(f"{number}/{_WHEN}")
    dated = {} if when is None else {"when": float(when)}
    return {"op": "logs", "job": native.job_id, "from": _offsets(positions, number), **dated}


def _offsets(positions: Mapping[str, str], number: int) -> dict[str, int]:
    mine = _of(positions, number)
    return {name: int(at) for name, at in mine.items() if at.isdigit() and name != _WHEN}


def _of(places: Mapping[str, T], number: int) -> dict[str, T]:
    """Those of one host, by the names that it knows."""
    return {name.partition("/")[2]: place for name, place in places.items() if name.startswith(f"{number}/")}


def _only(logs: list[str] | None) -> dict[str, Any]:
    return {} if logs is None else {"only": logs}


def _pieces(done: Mapping[str, Any], data: bytes, number: int) -> list[_Piece]:
    pieces = []
    at = 0
    for file in done["files"]:
        end = file["offset"] + file["length"]
        pieces.append(
            _Piece(
                source=f"{number}/{file['name']}",
                rank=file["rank"],
                attempt=file["attempt"],
                offset=file["offset"],
                data=data[at : at + file["length"]],
                ends=done["complete"] and end >= file["size"],
                more=end < file["size"],
            )
        )
        at += file["length"]
    return pieces


def _lines(piece: _Piece) -> Iterator[LogLine]:
    return log_lines.lines(
        io.BytesIO(piece.data).read, piece.ends,
        source=piece.source, rank=piece.rank, attempt=piece.attempt, offset=piece.offset,
    )  # fmt: skip


def _of_silence(
    errors: Mapping[Host, SchedulerError], numbers: Mapping[Host, int], positions: Mapping[str, str], *, over: bool
) -> Iterator[LogLine]:
    if not errors:
        return
    if not over:
        raise Unreachable(f"its logs cannot be read: {'; '.join(map(str, errors.values()))}")
    for host, error in errors.items():
        source = f"{numbers[host]}/{_SILENT}"
        if source not in positions:
            text = f"accel: its logs cannot be read: {error}\n"
            yield LogLine(rank=None, stream="missing", text=text, source=source, position="1")
