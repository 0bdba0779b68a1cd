"""What containers of a Kubernetes cluster of the tests printed: kept and read as a kubelet does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LONGEST_PART = 16 * 1024
_MOST_TOLD, _LINES_TOLD = 2048, 80


@dataclass(frozen=True)
class Wanted:
    """What a reader asks for; the names of the kubelet's API are `sinceSeconds` and so on."""

    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since_ns: int = 0
    limit: int | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Wanted:
        since = 0
        if "sinceSeconds" in query:
            since = time.time_ns() - int(query["sinceSeconds"]) * 10**9
        if "sinceTime" in query:
            since = int(datetime.fromisoformat(query["sinceTime"].replace("Z", "+00:00")).timestamp()) * 10**9
        return cls(
            follow=query.get("follow") == "true",
            timestamps=query.get("timestamps") == "true",
            tail=int(query["tailLines"]) if "tailLines" in query else None,
            since_ns=since,
            limit=int(query["limitBytes"]) if "limitBytes" in query else None,
        )


class ContainerLog:
    """Of one container, from one start to its end: a file with a line `NANOSECONDS F|P TEXT` for each line or part."""

    def __init__(self, file: Path) -> None:
        self.closed = False
        self._unfinished = b""
        self._last_ns = 0
        self._size = 0
        self._changed = asyncio.Event()
        file.parent.mkdir(parents=True, exist_ok=True)
        # Open as long as somebody reads it, also when its pod and all its files are gone.
        self._out = file.open("w+b", buffering=0)

    def add(self, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._write(line, b"F")
        while len(self._unfinished) >= _LONGEST_PART:
            self._write(self._unfinished[:_LONGEST_PART], b"P")
            self._unfinished = self._unfinished[_LONGEST_PART:]
        self._tell()

    def close(self) -> None:
        if not self.closed:
            if self._unfinished:
                self._write(self._unfinished, b"P")
            self.closed = True
            self._tell()

    def last_words(self) -> str:
        """What a pod says in place of a message that its container did not write."""
        text = b"".join(part for _, part in self._records(0)[0])
        return b"".join(text.splitlines(keepends=True)[-_LINES_TOLD:])[-_MOST_TOLD:].decode(errors="replace")

    async def read(self, wanted: Wanted) -> AsyncIterator[bytes]:
        """Ends with the log, or, unless it is followed, with what there is."""
        left, starts_line, position = wanted.limit, True, 0
        records, position = self._records(0)
        records = [each for each in records if each[0] >= wanted.since_ns]
        if wanted.tail is not None:
            records = _last_lines(records, wanted.tail)
        while True:
            changed, closed = self._changed, self.closed
            out = bytearray()
            for when, part in records:
                if wanted.timestamps and starts_line:
                    out += f"{_timestamp(when)} ".encode()
                out += part
                starts_line = part.endswith(b"\n")
            if left is not None:
                out = out[:left]
                left -= len(out)
            if out:
                yield bytes(out)
            if left == 0 or not wanted.follow:
                return
            records, position = self._records(position)
            if records:
                continue
            if closed:
                return
            await changed.wait()

    def _write(self, text: bytes, kind: bytes) -> None:
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        self._size += self._out.write(b"%d %s %s\n" % (self._last_ns, kind, text))

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _records(self, position: int) -> tuple[list[tuple[int, bytes]], int]:
        data = os.pread(self._out.fileno(), self._size - position, position)
        found = []
        for line in data.split(b"\n")[:-1]:
            when, kind, text = line.split(b" ", 2)
            found.append((int(when), text + b"\n" if kind == b"F" else text))
        return found, position + len(data)


def _last_lines(records: list[tuple[int, bytes]], count: int) -> list[tuple[int, bytes]]:
    starts = [at for at in range(len(records)) if at == 0 or records[at - 1][1].endswith(b"\n")]
    return records[starts[-count] :] if 0 < count <= len(starts) else records if count else []


def _timestamp(nanoseconds: int) -> str:
    whole, rest = divmod(nanoseconds, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{rest:09d}Z"
