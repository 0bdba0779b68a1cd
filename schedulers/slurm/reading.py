"""A job's log lines from the login node: byte-exact, from a cursor, none lost, doubled or cut."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import logfiles
from ..job import Cursor, LogLine

if TYPE_CHECKING:
    from .cluster import Login

_LIMIT = 1 << 20


def read(login: Login, job_id: str, since: Cursor | None, *, over: bool) -> Iterator[LogLine]:
    """The lines that there are now; their sources are named as in the job's own directory of logs."""
    pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
    positions = {source: int(at) for source, _, at in pairs if at.isdigit()}
    limit, more = _LIMIT, True
    while more:
        step = {"op": "logs", "job": job_id, "from": positions, "limit": limit, "over": over}
        (done,), data = login.ask([step])
        more, stuck = False, False
        for file, content in sorted(_contents(done["files"], data), key=lambda pair: _order(pair[0])):
            before = positions.get(file["name"], 0)
            ends = file["offset"] + file["length"] >= file["size"]
            for line in _lines(file, content, complete=done["complete"] and ends):
                positions[file["name"]] = int(line.position)
                yield line
            more = more or not ends
            stuck = stuck or (not ends and positions.get(file["name"], 0) == before)
        limit *= 4 if stuck else 1  # one line is longer than what was read


def _contents(files: list[Mapping[str, Any]], data: bytes) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    at = 0
    for file in files:
        yield file, data[at : at + file["length"]]
        at += file["length"]


def _order(file: Mapping[str, Any]) -> tuple[float, int, str]:
    """Attempt by attempt and rank by rank; setup comes first, and what launchers have to say of it last."""
    if file["rank"] is None:
        return (-1.0 if file["name"].endswith("setup") else float("inf"), 0, file["name"])
    return (float(file["attempt"]), file["rank"], file["name"])


def _lines(file: Mapping[str, Any], content: bytes, *, complete: bool) -> Iterator[LogLine]:
    offset = file["offset"]
    for data in logfiles.split(io.BytesIO(content).read, complete):
        offset += len(data)
        text = data.decode("utf-8", "surrogateescape")
        yield LogLine(rank=file["rank"], attempt=file["attempt"], text=text, source=file["name"], position=str(offset))
