"""A job's log lines, read on the login node: byte-exact, from a cursor, no line lost, doubled or cut."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ..job import Cursor, LogLine
from ..node.logs import order
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
        files = sorted(_contents(reply["files"], data), key=lambda pair: _order(pair[0]))
        step["only"] = []
        for file, content in files:
            at_end = file["offset"] + file["length"] >= file["size"]
            for line in _lines(file, content, complete=reply["complete"] and at_end):
                positions[file["name"]] = int(line.position)
                yield line
            if not at_end:
                step["only"].append(file["name"])
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


def _contents(files: list[Mapping[str, Any]], data: bytes) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    offset = 0
    for file in files:
        yield file, data[offset : offset + file["length"]]
        offset += file["length"]


def _order(file: Mapping[str, Any]) -> tuple[float, int, str]:
    return order(file["name"], file["rank"], file["attempt"])


def _lines(file: Mapping[str, Any], content: bytes, *, complete: bool) -> Iterator[LogLine]:
    return log_lines.lines(
        io.BytesIO(content).read, complete,
        source=file["name"], rank=file["rank"], attempt=file["attempt"], offset=file["offset"],
    )  # fmt: skip
