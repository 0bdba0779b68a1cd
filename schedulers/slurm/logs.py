"""A job's log lines, read on the login node: byte-exact, from a cursor, no line lost, doubled or cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ..job import Cursor, LogLine
from ..store import log_lines

# `query` of a cluster: steps -> the reply to each, and the bytes of the logs.
Query: TypeAlias = "Callable[[list[dict[str, Any]]], tuple[list[Any], bytes]]"

# The bytes of one log, and of all logs, in one reply.
_LIMIT, _MAX_BYTES = 4 << 20, 16 << 20


def read(query: Query, job_id: str, since: Cursor | None, *, finished: bool) -> Iterator[LogLine]:
    """Yield the lines that exist now. Their sources are named as in the job's own log directory."""
    positions = log_lines.offsets(since)
    step: dict[str, Any] = {"op": "logs", "job": job_id, "limit": _LIMIT, "most": _MAX_BYTES, "over": finished}
    more = True
    while more:
        (reply,), data = query([{**step, "from": positions}])
        chunks = log_lines.chunks(reply, data)
        for chunk in chunks:
            for line in chunk.lines():
                positions[line.source] = int(line.position)
                yield line
        step["only"] = [chunk.source for chunk in chunks if chunk.has_more]
        more = bool(step["only"])


def cursor_at(query: Query, job_id: str, when: float) -> Cursor:
    """Return the position of its logs at that time."""
    offsets: dict[str, int] = query([{"op": "at", "job": job_id, "when": when}])[0][0]
    return Cursor({name: str(offset) for name, offset in offsets.items()})


def tail_at(query: Query, job_id: str, since: Cursor, count: int, *, finished: bool) -> Cursor:
    """Return the position at which the last `count` lines of each rank begin."""
    step = {"op": "tail", "job": job_id, "from": log_lines.offsets(since), "count": count, "over": finished}

    def log_ends(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        return list(query([{**step, "counts": counts}])[0][0])

    return since.moved(log_lines.last_lines(log_ends, count))
