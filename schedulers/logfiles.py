"""Log lines from a directory of log files: byte-exact, from a cursor, none lost, doubled or cut.

    rank-3.a0.log    what rank 3 wrote in attempt 0, stdout and stderr in the order they were written
    node-0.log       what the launcher of node 0 wrote
    setup.log        what the setup commands wrote
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from .job import Cursor, LogLine

_NAME = re.compile(r"(?:rank-(?P<rank>\d+)\.a(?P<attempt>\d+)|node-\d+|setup)\.log\Z")
_CHUNK = 1 << 20


def read(directory: Path, since: Cursor | None, *, complete: bool) -> Iterator[LogLine]:
    """The lines that are in the files now, after the cursor.

    A line ends with `\\n`, `\\r\\n` or `\\r` (a progress bar's step). One that has no end yet is held back, unless
    `complete` says that nobody will write to the files any more.
    """
    for path in sorted(directory.glob("*.log"), key=_order):
        name = _NAME.match(path.name)
        if name:
            rank = name["rank"]
            yield from _lines(path, since, complete, rank=int(rank) if rank else None, attempt=int(name["attempt"] or 0))


def _order(path: Path) -> tuple[float, int, str]:
    """Attempt by attempt and rank by rank; what the launcher has to say of it comes last, as it came."""
    name = _NAME.match(path.name)
    if name is None or name["rank"] is None:
        return (float("-inf") if path.name == "setup.log" else float("inf"), 0, path.name)
    return (float(name["attempt"]), int(name["rank"]), path.name)


def _lines(path: Path, since: Cursor | None, complete: bool, *, rank: int | None, attempt: int) -> Iterator[LogLine]:
    source = path.name.removesuffix(".log")
    at = since.position(source) if since else None
    offset = int(at) if at and at.isdigit() else 0
    with path.open("rb") as file:
        file.seek(offset)
        for data in _split(file.read, complete):
            offset += len(data)
            text = data.decode("utf-8", "surrogateescape")
            yield LogLine(rank=rank, attempt=attempt, text=text, source=source, position=str(offset))


def _split(read: Callable[[int], bytes], complete: bool) -> Iterator[bytes]:
    rest = b""
    while chunk := read(_CHUNK):
        lines = (rest + chunk).splitlines(keepends=True)
        # A `\r` that is the last byte may be one half of `\r\n`.
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        yield from lines
    if rest and complete:
        yield rest
