"""The file of a job's log: lines of JSON, and after each batch of them a mark. Offsets in it are positions.

A mark has the cursor of the job's target, from which reading goes on, and the time. What follows the last mark is not
part of the log: a server that was killed may have left half a batch.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from schedulers.job import Cursor, LogLine

_MARK, _RANK, _PARTIAL = b'{"cursor":', b'{"rank":', b',"partial":true}\n'
_BATCH_S = 0.25  # after which a batch ends that grows slowly


@dataclass(frozen=True)
class Mark:
    """The last mark of a file. `end`: the offset after it; `complete`: nothing will follow."""

    end: int = 0
    cursor: str = ""
    complete: bool = False


def encode(line: LogLine) -> bytes:
    """Return a line of the file."""
    return _dump(line.to_json())


def encode_mark(cursor: Cursor, *, complete: bool) -> bytes:
    """Return a mark with the time."""
    return _dump({"cursor": str(cursor), "at": round(time.time(), 3)} | ({"complete": True} if complete else {}))


def is_mark(line: bytes) -> bool:
    """Return True for a mark, False for a line of the log."""
    return line.startswith(_MARK)


def batches(lines: Iterable[LogLine], cursor: Cursor, size: int) -> Iterator[bytes]:
    """Yield the encoded lines in batches of about `size` bytes; move the cursor past them.

    If reading the lines fails, the error is raised after those that were read.
    """
    batch, began_at = bytearray(), time.monotonic()
    try:
        for line in lines:
            cursor.advance(line)
            batch += encode(line)
            if len(batch) >= size or time.monotonic() - began_at >= _BATCH_S:
                full, batch = bytes(batch), bytearray()
                yield full
                began_at = time.monotonic()
    finally:
        if batch:
            yield bytes(batch)


def last_mark(path: str) -> Mark:
    """Return the last mark of the file, or an empty one."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # No text of a line looks like a mark: its quotes are escaped.
            begin = content.rfind(_MARK, 0, content.rfind(b"\n") + 1)
            end = content.find(b"\n", begin) + 1
            mark = json.loads(content[begin:end])
            return Mark(end, str(mark["cursor"]), mark.get("complete") is True)
    except (FileNotFoundError, ValueError):  # also if the file is empty, or has no mark
        return Mark()


def append(path: str, end: int, data: bytes) -> None:
    """Replace what follows `end` by the data. Raises OSError; then nothing follows `end`."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | (0 if end else os.O_CREAT), 0o600)
    try:
        os.ftruncate(fd, end)
        try:
            while data:  # one write is enough, unless the disk is full
                data = data[os.write(fd, data) :]
        except OSError:
            os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def read(path: str, since: int, end: int, limit: int) -> bytes:
    """Return whole lines: at most `limit` bytes, but at least one line if there is one."""
    if since >= end:
        return b""
    with open(path, "rb") as file:
        file.seek(since)
        data = file.read(min(limit, end - since))
        return data[: data.rfind(b"\n") + 1] or data + file.readline()


def is_position(path: str, offset: int, end: int) -> bool:
    """Return True if a line ends at the offset."""
    if offset == 0:
        return True
    return offset <= end and read(path, offset - 1, offset, 1) == b"\n"


def lines(path: str, since: int, end: int) -> Iterator[bytes]:
    """Yield lines and marks."""
    if since < end:
        with open(path, "rb") as file:
            file.seek(since)
            for line in file:
                yield line
                since += len(line)
                if since >= end:
                    return


def position_at(path: str, since: int, end: int, when: float) -> int:
    """Return where the first batch begins that was read at or after `when` (seconds since the epoch)."""
    position = offset = since
    for line in lines(path, since, end):
        offset += len(line)
        if is_mark(line):
            if json.loads(line)["at"] >= when:
                return position
            position = offset
    return position


def last_lines(path: str, since: int, end: int, count: int) -> dict[str, int]:
    """Return where the last `count` finished lines of each rank begin; `null` is the launcher.

    A line in pieces counts once. One whose last piece is missing does not count, and is not left out.
    """
    finished: dict[str, deque[int]] = {}
    unfinished: dict[str, int] = {}
    offset = since
    for line in lines(path, since, end):
        if not is_mark(line):
            rank = line[len(_RANK) : line.index(b",")].decode()
            begin = unfinished.pop(rank, offset)
            begins = finished.setdefault(rank, deque(maxlen=count))
            if line.endswith(_PARTIAL):
                unfinished[rank] = begin
            else:
                begins.append(begin)
        offset += len(line)
    return {rank: begins[0] if begins else unfinished.get(rank, end) for rank, begins in finished.items()}


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode("ascii") + b"\n"
