"""A job's log lines from the login node: byte-exact, from a cursor, no line lost, doubled or cut."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ..job import Cursor, LogLine
from ..node.logs import order
from ..store import log_lines

# `Login.ask`: steps -> the answer to each, and what follows them.
Ask: TypeAlias = "Callable[[list[dict[str, Any]]], tuple[list[Any], bytes]]"

# Bytes of one log, and of all, that are read at once. A log gives a line or a piece of one for each MOST_BYTES.
_LIMIT, _MOST = 4 << 20, 16 << 20


def read(ask: Ask, job_id: str, since: Cursor | None, *, over: bool) -> Iterator[LogLine]:
    """Yield the lines that exist now. Their sources are named as in the job's own log directory."""
    positions = log_lines.offsets(since)
    step: dict[str, Any] = {"op": "logs", "job": job_id, "limit": _LIMIT, "most": _MOST, "over": over}
    more = True
    while more:
        (done,), data = ask([{**step, "from": positions}])
        files = sorted(_contents(done["files"], data), key=lambda pair: _order(pair[0]))
        step["only"] = []
        for file, content in files:
            ends = file["offset"] + file["length"] >= file["size"]
            for line in _lines(file, content, complete=done["complete"] and ends):
                positions[file["name"]] = int(line.position)
                yield line
            if not ends:
                step["only"].append(file["name"])
        more = bool(step["only"])


def tail_at(ask: Ask, job_id: str, since: Cursor, count: int, *, over: bool) -> Cursor:
    """Return the position at which the last `count` lines of each rank begin."""
    step = {"op": "tail", "job": job_id, "from": log_lines.offsets(since), "count": count, "over": over}

    def ends(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        return list(ask([{**step, "counts": counts}])[0][0])

    return since.moved(log_lines.last_lines(ends, count))


def _contents(files: list[Mapping[str, Any]], data: bytes) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    at = 0
    for file in files:
        yield file, data[at : at + file["length"]]
        at += file["length"]


def _order(file: Mapping[str, Any]) -> tuple[float, int, str]:
    return order(file["name"], file["rank"], file["attempt"])


def _lines(file: Mapping[str, Any], content: bytes, *, complete: bool) -> Iterator[LogLine]:
    return log_lines.lines(
        io.BytesIO(content).read, complete,
        source=file["name"], rank=file["rank"], attempt=file["attempt"], offset=file["offset"],
    )  # fmt: skip
