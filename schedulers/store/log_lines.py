"""Log lines, read byte-exact from a directory of log files from a cursor on: none is lost, repeated or cut.

The files are those of `schedulers.node.logs`. A line longer than MAX_BYTES is split into pieces.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..job import Cursor, LogLine
from ..node import logs as files

MAX_BYTES = 1 << 20  # of a piece, including a line's ending
_CHUNK = 1 << 20


def read(directory: Path, since: Cursor | None, *, complete: bool) -> Iterator[LogLine]:
    r"""Yield the lines after the cursor that are in the files now.

    A line ends with `\n`, `\r\n` or `\r` (a progress bar's step). A line without an ending is held back, unless
    nothing writes to the files any more (`complete`); of a line too long for a piece, only the last piece is held
    back.
    """
    start = offsets(since)
    for name, rank, attempt in _files(directory):
        file = files.opened(f"{directory}/{name}.log")
        if file is not None:
            with file:
                offset = file.seek(start.get(name, 0))
                yield from lines(file.read, complete, source=name, rank=rank, attempt=attempt, offset=offset)


class Chunk(NamedTuple):
    """A part of a log that another machine has sent. `source`: the name of the log in cursors."""

    source: str
    rank: int | None
    attempt: int
    offset: int
    data: bytes
    ends: bool  # with the end of a file that nothing writes to any more
    has_more: bool

    @property
    def order(self) -> tuple[float, int, str]:
        """The key of `node.logs.order`."""
        return files.order(self.source, self.rank, self.attempt)

    def lines(self) -> Iterator[LogLine]:
        """Yield the lines that end in the chunk, and the last one if the file `ends`."""
        source, read = self.source, io.BytesIO(self.data).read
        return lines(read, self.ends, source=source, rank=self.rank, attempt=self.attempt, offset=self.offset)


def chunks(reply: Mapping[str, Any], data: bytes, prefix: str = "") -> list[Chunk]:
    """Return the chunks of a reply of `node/jobs.logs`, in the order of their lines. `prefix`: of their sources."""
    result, start = [], 0
    for file in reply["files"]:
        end = file["offset"] + file["length"]
        result.append(
            Chunk(
                source=prefix + file["name"],
                rank=file["rank"],
                attempt=file["attempt"],
                offset=file["offset"],
                data=data[start : start + file["length"]],
                ends=reply["complete"] and end >= file["size"],
                has_more=end < file["size"],
            )
        )
        start += file["length"]
    return sorted(result, key=lambda chunk: chunk.order)


def lines(
    read: Callable[[int], bytes], complete: bool, *, source: str, rank: int | None, attempt: int, offset: int
) -> Iterator[LogLine]:
    """Yield the lines of one log from `offset` on, where `read` begins."""
    for data, partial in split(read, complete):
        offset += len(data)
        text = data.decode("utf-8", "surrogateescape")
        yield LogLine(rank=rank, attempt=attempt, text=text, source=source, position=str(offset), partial=partial)


def split(read: Callable[[int], bytes], complete: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield lines, each with False, and pieces of lines that continue, with True."""
    rest = b""
    while chunk := read(_CHUNK):
        parts = (rest + chunk).splitlines(keepends=True)
        # A `\r` that is the last byte may be one half of `\r\n`.
        rest = b"" if parts[-1].endswith(b"\n") else parts.pop()
        for part in parts:
            yield part if len(part) < MAX_BYTES else (yield from pieces(part)), False
        rest = yield from pieces(rest)
    if rest and complete:
        yield rest, False


def pieces(line: bytes) -> Generator[tuple[bytes, bool], None, bytes]:
    """Yield the pieces of a line that is too long, and return the rest of it.

    The cuts depend on the line alone, not on how much of it is known, so that the positions of cursors stay the
    same.
    """
    while is_long(line):
        cut = cut_at(line)
        yield line[:cut], True
        line = line[cut:]
    return line


def is_long(line: bytes) -> bool:
    """Return True if the line's text does not fit in a piece, which reserves room for an ending."""
    return len(line) > MAX_BYTES - 2 and len(line.rstrip(b"\r\n")) > MAX_BYTES - 2


def cut_at(line: bytes) -> int:
    """Return where the first piece of a long line ends: between characters if it is UTF-8."""
    end = MAX_BYTES - 2
    return next((index for index in range(end, end - 4, -1) if line[index] & 0xC0 != 0x80), end)


def cursor_at(directory: Path, when: float) -> Cursor:
    """Return each file's position at that time: the beginning of the line that was being written."""
    return Cursor({source: str(offset) for source, offset in files.positions_at(str(directory), when).items()})


def tail_at(directory: Path, since: Cursor, count: int, *, complete: bool) -> Cursor:
    """Return where the last `count` lines of each rank begin, none before `since`.

    A line without an end counts as in `read`, and one in pieces counts once.
    """
    start = offsets(since)

    def read_tails(counts: Mapping[str, int]) -> list[dict[str, Any]]:
        tails = []
        for name, rank, attempt in _files(directory):
            limit = counts.get(name, count)
            lines, offset = files.tail(f"{directory}/{name}.log", start.get(name, 0), limit, complete)
            tails.append({"name": name, "rank": rank, "attempt": attempt, "lines": lines, "begin": offset})
        return tails

    return since.moved(last_lines(read_tails, count))


def last_lines(read_tails: Callable[[Mapping[str, int]], list[dict[str, Any]]], count: int) -> dict[str, str]:
    """Return where the last `count` lines of each rank begin, in all its logs together.

    `read_tails` returns, for each log, the number of its last lines and where they begin: the last `count`, or as many
    as its argument says for that log.
    """
    logs = read_tails({})
    remaining: dict[int | None, int] = {}
    counts: dict[str, int] = {}
    for log in sorted(logs, key=lambda log: files.order(log["name"], log["rank"], log["attempt"]), reverse=True):
        limit = remaining.get(log["rank"], count)
        if limit < log["lines"]:
            counts[log["name"]] = limit
        remaining[log["rank"]] = limit - min(limit, log["lines"])
    if counts:  # lines of a rank's earlier attempts
        logs = read_tails(counts)
    return {log["name"]: str(log["begin"]) for log in logs}


def _files(directory: Path) -> list[tuple[str, int | None, int]]:
    entries = [entry for entry in files.log_files(str(directory)) if "/" not in entry[0]]
    return sorted(entries, key=lambda entry: files.order(*entry))


def positions(since: Cursor | None) -> dict[str, str]:
    """Return the cursor's position in each source that it names."""
    pairs = (pair.partition("=") for pair in str(since or "").split(",") if pair)
    return {source: position for source, _, position in pairs}


def offsets(since: Cursor | None) -> dict[str, int]:
    """Return the cursor's position in each file that it names."""
    return {source: int(position) for source, position in positions(since).items() if position.isdigit()}


class LogText:
    """Lines of ranks as text: exactly their bytes, with `[rank N] ` before each line if `prefix`.

    A prefix starts on a line of its own, so a line without an ending gets one. None: prefixes from the first line of a
    rank other than 0.
    """

    def __init__(self, prefix: bool | None) -> None:
        self.prefix = prefix
        self.unended = False  # the last line has no ending
        self._unfinished: tuple[str, int | None] | None = None  # source and rank of a line in pieces

    def add(self, line: LogLine) -> bytes:
        """Return the bytes of a rank's line."""
        if self.prefix is None and line.rank:
            self.prefix = True
        data = line.data
        if self.prefix and self._unfinished != (line.source, line.rank):
            data = self.end() + f"[rank {line.rank}] ".encode() + data
        self.unended = not data.endswith((b"\n", b"\r"))
        self._unfinished = (line.source, line.rank) if line.partial else None
        return data

    def end(self) -> bytes:
        """Return the ending that the last line lacks."""
        ending, self.unended, self._unfinished = b"\n" * self.unended, False, None
        return ending
