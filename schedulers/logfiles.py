"""Log lines from a directory of log files: byte-exact, from a cursor, none lost, doubled or cut.

rank-3.a0.log    what rank 3 wrote in attempt 0, stdout and stderr in the order they were written
node-0.log       what the launcher of node 0 wrote
setup.log        what the setup commands wrote
slurm.log        what a batch script of Slurm's wrote
sizes.jsonl      how long each of them was at what time, noted once a second while they grow
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .job import Cursor, LogLine

_NAME = re.compile(r"(?:rank-(?P<rank>\d+)\.a(?P<attempt>\d+)|node-\d+|setup|slurm)\.log\Z")
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
            yield from _lines(
                path, since, complete, rank=int(rank) if rank else None, attempt=int(name["attempt"] or 0)
            )


class Clock:
    """Notes when the files grew, so that lines which carry no time can be asked for by it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: dict[str, int] = {}

    def note(self) -> None:
        """Writes the sizes down, when one has changed. A full disk loses the note, not the job."""
        sizes = {path.name.removesuffix(".log"): path.stat().st_size for path in self._directory.glob("*.log")}
        if sizes == self._sizes:
            return
        self._sizes = sizes
        line = json.dumps({"schema": 1, "time": time.time(), "sizes": sizes}) + "\n"
        try:
            with open(self._directory / "sizes.jsonl", "ab", buffering=0) as file:
                file.write(line.encode())
        except OSError:
            return


def cursor_at(directory: Path, when: float) -> Cursor:
    """Where each file stood at that time, at the beginning of the line that was being written."""
    before: dict[str, int] = {}
    try:
        lines = (directory / "sizes.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            noted = json.loads(line)
        except ValueError:  # cut short by a crash
            continue
        if noted["time"] > when:
            break
        before = noted["sizes"]
    return Cursor({source: str(_line_start(directory / f"{source}.log", size)) for source, size in before.items()})


def _line_start(path: Path, offset: int) -> int:
    """The beginning of the line that holds the byte before `offset`, or `offset` when that byte ends a line."""
    with path.open("rb") as file:
        while offset > 0:
            start = max(0, offset - 4096)
            file.seek(start)
            found = max((block := file.read(offset - start)).rfind(b"\n"), block.rfind(b"\r"))
            if found >= 0:
                return start + found + 1
            offset = start
    return 0


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
        for data in split(file.read, complete):
            offset += len(data)
            text = data.decode("utf-8", "surrogateescape")
            yield LogLine(rank=rank, attempt=attempt, text=text, source=source, position=str(offset))


def split(read: Callable[[int], bytes], complete: bool) -> Iterator[bytes]:
    rest = b""
    while chunk := read(_CHUNK):
        lines = (rest + chunk).splitlines(keepends=True)
        # A `\r` that is the last byte may be one half of `\r\n`.
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        yield from lines
    if rest and complete:
        yield rest
