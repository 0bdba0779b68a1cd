"""A job's log lines from all of its hosts: byte-exact, from a cursor on, none lost, repeated or cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ...errors import SchedulerError, Unreachable
from ...job import Cursor, LogLine
from ...store import log_lines
from ..host_list import Host
from .native_id import Native
from .status import Hosts

# Bytes read at once: of one log, of all logs of a host, and of all hosts. At least log_lines.MAX_BYTES, the longest
# part of a line.
_LIMIT, _MAX_BYTES, _MAX_TOTAL_BYTES = 4 << 20, 16 << 20, 64 << 20
_UNREACHABLE = "unreachable"
_SINCE = "since"  # stands for a host's offsets at this time, which could not be queried

T = TypeVar("T")


def read(hosts: Hosts, native: Native, since: Cursor | None) -> Iterator[LogLine]:
    """Yield the lines that exist now. A host that cannot be reached does not delay the others' lines.

    For such a host, raises Unreachable after the others' lines if the job may continue; if it has ended, yields one
    line of the launcher's, once.
    """
    positions = log_lines.positions(since)
    numbers = {host: number for number, host in enumerate(native.hosts)}
    pending = list(native.hosts)
    max_bytes = max(log_lines.MAX_BYTES, min(_MAX_BYTES, _MAX_TOTAL_BYTES // len(native.hosts)))
    limits = {"limit": min(_LIMIT, max_bytes), "most": max_bytes}
    unread: dict[Host, list[str]] = {}
    errors: dict[Host, SchedulerError] = {}
    finished, skip_down = False, True
    while pending:
        steps = {host: [_step(native, positions, numbers[host]) | limits] for host in pending}
        for host, logs in unread.items():
            steps[host][0]["only"] = logs
        chunks: list[log_lines.Chunk] = []
        unread = {}
        for host, outcome in hosts.query(steps, skip_down=skip_down).items():
            if outcome.error is not None or outcome.value is None:
                errors[host] = outcome.error or Unreachable(f"{host}: no answer")
                continue
            finished = finished or bool(outcome.value.done[0]["over"])
            host_chunks = log_lines.chunks(outcome.value.done[0], outcome.value.data, f"{numbers[host]}/")
            chunks += host_chunks
            unfinished = [chunk.source.partition("/")[2] for chunk in host_chunks if chunk.has_more]
            if unfinished:
                unread[host] = unfinished
        for chunk in sorted(chunks, key=lambda chunk: chunk.order):
            for line in chunk.lines():
                positions[line.source] = line.position
                yield line
        pending = list(unread)
        if not pending and finished and skip_down:
            # Retry unreachable hosts: what they do not return now counts as missing.
            skip_down = False
            pending = [host for host in errors if f"{numbers[host]}/{_UNREACHABLE}" not in positions]
            for host in pending:
                del errors[host]
    yield from _unreachable_line(errors, numbers, positions, finished=finished)


def cursor_at(hosts: Hosts, native: Native, when: float) -> Cursor:
    """Return the cursor for a time. A host that cannot be reached is queried for it when its lines are read."""
    step = {"op": "at", "job": native.job_id, "when": when}
    positions: dict[str, str] = {}
    for number, outcome in enumerate(hosts.query({host: [step] for host in native.hosts}).values()):
        offsets = {_SINCE: when} if outcome.value is None else outcome.value.done[0]
        positions |= {f"{number}/{name}": str(offset) for name, offset in offsets.items()}
    return Cursor(positions)


def tail_at(hosts: Hosts, native: Native, since: Cursor, count: int) -> Cursor:
    """Return the cursor at which the last `count` lines of each rank begin, on whichever hosts its attempts were.

    A host that cannot be reached now returns all its lines later.
    """
    positions = log_lines.positions(since)
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
        for number, outcome in enumerate(hosts.query(requests, skip_down=True).values()):
            logs = [] if outcome.value is None else outcome.value.done[0]
            tails += [{**log, "name": f"{number}/{log['name']}"} for log in logs]
        return tails

    return since.moved(log_lines.last_lines(read_tails, count))


def _step(native: Native, positions: Mapping[str, str], number: int) -> dict[str, Any]:
    when = positions.get(f"{number}/{_SINCE}")
    since = {} if when is None else {"when": float(when)}
    return {"op": "logs", "job": native.job_id, "from": _offsets(positions, number), **since}


def _offsets(positions: Mapping[str, str], number: int) -> dict[str, int]:
    host_positions = _positions_of_host(positions, number)
    return {name: int(position) for name, position in host_positions.items() if position.isdigit() and name != _SINCE}


def _positions_of_host(by_source: Mapping[str, T], number: int) -> dict[str, T]:
    """Return the values of one host, by the names that the host uses."""
    return {name.partition("/")[2]: value for name, value in by_source.items() if name.startswith(f"{number}/")}


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
