"""A job's log lines from all of its hosts: byte-exact, from a cursor, none lost, doubled or cut."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import logfiles
from ..errors import SchedulerError, Unreachable
from ..job import Cursor, LogLine
from ..remote.hosts import Host
from .asking import Hosts
from .native import Native

_LIMIT = 1 << 20
_SILENT = "unreachable"
_WHEN = "since"  # of a host that could not be asked where its logs stood at a time: that time


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
        """Attempt by attempt and rank by rank; setup comes first, and what launchers have to say of it last."""
        if self.rank is None:
            return (-1.0 if self.source.endswith("setup") else float("inf"), 0, self.source)
        return (float(self.attempt), self.rank, self.source)


def read(hosts: Hosts, native: Native, since: Cursor | None) -> Iterator[LogLine]:
    """The lines that there are now. A host that cannot be asked does not hold up the others' lines.

    Raises Unreachable, when the others' lines were given, for a job that may go on; of one that is over, the host's
    silence is one line of the launcher's, said once.
    """
    positions = _positions(since)
    numbers = {host: number for number, host in enumerate(native.hosts)}
    asked, limits = list(native.hosts), dict.fromkeys(native.hosts, _LIMIT)
    errors: dict[Host, SchedulerError] = {}
    over, believe = False, True
    while asked:
        steps = {host: [_step(native, positions, numbers[host], limits[host])] for host in asked}
        pieces: list[_Piece] = []
        again: list[Host] = []
        for host, outcome in hosts.ask(steps, believe_down=believe).items():
            if outcome.error is not None or outcome.value is None:
                errors[host] = outcome.error or Unreachable(f"{host}: no answer")
                continue
            over = over or bool(outcome.value.done[0]["over"])
            found = _pieces(outcome.value.done[0], outcome.value.data, numbers[host])
            pieces += found
            if any(piece.more for piece in found):
                again.append(host)
        for piece in sorted(pieces, key=lambda piece: piece.order):
            lines = 0
            for line in _lines(piece):
                positions[line.source] = line.position
                lines += 1
                yield line
            if not lines and piece.more:  # one line is longer than what was read
                limits[native.hosts[int(piece.source.partition("/")[0])]] *= 4
        asked = again
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


def _positions(since: Cursor | None) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
    return {source: position for source, _, position in pairs}


def _step(native: Native, positions: Mapping[str, str], number: int, limit: int) -> dict[str, Any]:
    mine = {source.partition("/")[2]: at for source, at in positions.items() if source.startswith(f"{number}/")}
    start = {name: int(at) for name, at in mine.items() if at.isdigit() and name != _WHEN}
    when = {"when": float(mine[_WHEN])} if _WHEN in mine else {}
    return {"op": "logs", "job": native.job_id, "from": start, "limit": limit, **when}


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
    offset = piece.offset
    for data in logfiles.split(io.BytesIO(piece.data).read, piece.ends):
        offset += len(data)
        text = data.decode("utf-8", "surrogateescape")
        yield LogLine(rank=piece.rank, attempt=piece.attempt, text=text, source=piece.source, position=str(offset))


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
