"""The log files of a job, on the machine that has them: their names, sizes over time and last lines.

rank-3.a0.log   the output of rank 3 in attempt 0, stdout and stderr in the order they were written
node-0.log      the output of node 0's launcher; setup.log: of setup commands; slurm.log: of a batch script
aN/             the same of attempt N and those after it, where each start has a directory of its own
sizes.jsonl     the sizes of the files at a time, noted once a second while they grow

Nothing here reads a file as a whole, and a file that cannot be read is no error: jobs may write to their
directories.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import stat
import time

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

LOG = re.compile(r"(?:rank-(?P<rank>\d+)\.a(?P<attempt>\d+)|node-\d+|setup|slurm)\.log\Z")
ATTEMPT = re.compile(r"a(\d+)\Z")
NOTES = "sizes.jsonl"
MAX_NOTES_BYTES = 4 << 20  # above it, old notes are thinned out to half of it
FINEST = 64  # thinned out, notes are 1/FINEST of their age apart
BLOCK = 1 << 16
LONGEST_EVENT = 1 << 20
FULL_BYTES = 1 << 16
FULL = "its disk was full: lines of its logs may be missing"

_ENDING = re.compile(rb"\n|\r(?!\n)")


def log_files(directory: str) -> list[tuple[str, int | None, int]]:
    """Return the name without `.log`, the rank (None: the launcher's) and the attempt of each log."""
    logs = []
    for path in ["", *sorted(entries(directory))]:
        match = ATTEMPT.match(path) if path else None
        if path and not match:
            continue
        first = int(match.group(1)) if match else 0
        for name in sorted(entries(os.path.join(directory, path))):
            log = LOG.match(name)
            if log:
                rank = int(log.group("rank")) if log.group("rank") else None
                logs.append((os.path.join(path, name[: -len(".log")]), rank, first + int(log.group("attempt") or 0)))
    return logs


def order(name: str, rank: int | None, attempt: int) -> tuple[float, int, str]:
    """Return a key that sorts logs by attempt and rank; setup comes first, launchers' reports last."""
    if rank is None:
        return (-1.0 if name.endswith("setup") else float("inf"), 0, name)
    return (float(attempt), rank, name)


def entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def opened(path: str) -> BinaryIO | None:
    """Open the log for reading; None if it is no regular file, or is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if os.path.isfile(path):
            raise
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return open(fd, "rb")
    os.close(fd)
    return None


class Clock:
    """A recorder of log sizes over time, which give the position in a log at a given time.

    The notes have MAX_NOTES_BYTES at most: recent ones are a second apart, older ones a share of their age.
    full: the disk of the logs has been full, so lines may be missing.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.sizes: dict[str, int] = {}
        self.full = False

    def note(self) -> None:
        """Record the sizes if one has changed. A full disk loses the note, not the job."""
        try:
            fs_stats = os.statvfs(self._directory)
            self.full = self.full or fs_stats.f_bavail * fs_stats.f_frsize < FULL_BYTES
            self._note()
        except OSError as error:
            self.full = self.full or error.errno in (errno.ENOSPC, errno.EDQUOT)

    def _note(self) -> None:
        sizes = self._look()
        if sizes == self.sizes:
            return
        self.sizes = sizes
        line = json.dumps({"schema": 1, "time": time.time(), "sizes": sizes}).encode() + b"\n"
        path = os.path.join(self._directory, NOTES)
        if size_of(path) + len(line) > MAX_NOTES_BYTES:
            _thin_out(path)
        with open(path, "ab", buffering=0) as file:
            file.write(line)

    def _look(self) -> dict[str, int]:
        sizes = {}
        for entry in os.scandir(self._directory):
            if entry.name.endswith(".log"):
                try:
                    sizes[entry.name[: -len(".log")]] = entry.stat().st_size
                except OSError:  # it has vanished, or is a link to nothing
                    continue
        return sizes


def size_of(path: str) -> int:
    """Return the size of the file in bytes; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _thin_out(path: str) -> None:
    """Replace the notes by fewer, whose distance grows with their age."""
    with open(path, "rb") as file:
        notes = [(note[0], line) for line in file for note in [_parse(line)] if note is not None]
    share: float = FINEST
    thinned = _spread(notes, share)
    while len(thinned) > 1 and sum(len(line) for line in thinned) > MAX_NOTES_BYTES // 2:
        share /= 2
        thinned = _spread(notes, share) if share >= 1 else thinned[::-2][::-1]
    partial = f"{path}.{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            file.writelines(thinned)
        os.replace(partial, path)
    except OSError:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def _spread(notes: list[tuple[float, bytes]], share: float) -> list[bytes]:
    """Return the newest note, and before each kept one the next that is older by 1/share of that one's age."""
    selected: list[bytes] = []
    newest = newer = notes[-1][0] if notes else 0.0
    for timestamp, line in reversed(notes):
        if not selected or newer - timestamp >= (newest - newer) / share:
            selected.append(line)
            newer = timestamp
    return selected[::-1]


def _parse(line: bytes) -> tuple[float, dict[str, int]] | None:
    """Return a note's time and sizes; None if a crash has cut it short."""
    try:
        note = json.loads(line)
        return float(note["time"]), {str(name): int(size) for name, size in note["sizes"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def positions_at(directory: str, when: float) -> dict[str, int]:
    """Return each log's offset at a time: the beginning of the line that was being written.

    For times long ago it is a little earlier.
    """
    offsets = {}
    for path in ["", *(name for name in sorted(entries(directory)) if ATTEMPT.match(name))]:
        for name, size in _sizes_at(os.path.join(directory, path, NOTES), when).items():
            relative_path = os.path.join(path, name)
            if LOG.match(os.path.basename(name) + ".log"):
                offsets[relative_path] = line_start(os.path.join(directory, relative_path + ".log"), size)
    return offsets


def _sizes_at(path: str, when: float) -> dict[str, int]:
    sizes: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for line in file:
                note = _parse(line)
                if note is not None and note[0] > when:
                    break
                sizes = sizes if note is None else note[1]
    except OSError:
        return sizes
    return sizes


def line_start(path: str, offset: int) -> int:
    """Return the start of the line that holds the byte before `offset`, or `offset` if that byte ends a line."""
    return next(_line_endings(path, 0, offset), 0)


def tail(path: str, start: int, count: int, complete: bool) -> tuple[int, int]:
    """Return how many of the last `count` lines after `start` the file has, and where the first of these begins.

    A line without an end counts only if `complete`: nothing writes to the file any more.
    """
    size = size_of(path)
    if size <= start or (complete and not count):
        return 0, max(size, start)
    partial_newline = not complete and _read(path, size - 1, 1) == b"\r"  # of a `\r\n`, perhaps
    lines, newest = 0, True
    for end in _line_endings(path, start, size):
        if partial_newline and end == size:
            continue
        if newest and complete and end < size:
            lines = 1
        newest = False
        if lines == count:
            return lines, end
        lines += 1
    if newest and complete:
        lines = 1
    return lines, start


def _line_endings(path: str, start: int, offset: int) -> Iterator[int]:
    """Yield where the lines between two offsets of a file end, the last one first."""
    file = opened(path)
    if file is None:
        return
    with file:
        offset = min(offset, os.fstat(file.fileno()).st_size)
        file.seek(offset)
        following = file.read(1)
        while offset > start:
            block_start = max(start, offset - BLOCK)
            file.seek(block_start)
            data = file.read(offset - block_start)
            ends = [match.end() for match in _ENDING.finditer(data + following) if match.end() <= len(data)]
            for end in reversed(ends):
                yield block_start + end
            following = data[:1]
            offset = block_start


def _read(path: str, offset: int, count: int) -> bytes:
    """Return `count` bytes of the file from `offset` on; none if there is no file."""
    file = opened(path)
    if file is None:
        return b""
    with file:
        file.seek(offset)
        return file.read(count)


def last_line(path: str, max_chars: int) -> str:
    """Return the last line that is not blank, cut to `max_chars` characters; empty if there is none.

    A line that begins before the last BLOCK bytes is returned from there on.
    """
    size = size_of(path)
    start = max(0, size - BLOCK)
    lines = _read(path, start, size - start).decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip()[:max_chars] if lines else ""


def json_lines(path: str, start: int = 0) -> list[dict[str, Any]]:
    """Return the JSON objects in the file from byte `start` on, one per line, without those that a crash cut short."""
    objects = []
    try:
        with open(path, "rb") as file:
            file.seek(start)
            rows = file.read().splitlines()
    except OSError:
        return []
    for row in rows:
        try:
            value = json.loads(row)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def newest_event(path: str, *names: str) -> dict[str, Any] | None:
    """Return the last event of one of these names in a file of events (JSON lines), read from its end."""
    end = size_of(path)
    for start in itertools.chain(_line_endings(path, 0, end), (0,)):
        line = _read(path, start, end - start) if end - start <= LONGEST_EVENT else b""
        end = start
        try:
            event = json.loads(line)
        except ValueError:  # cut short by a crash
            continue
        if isinstance(event, dict) and event.get("event") in names:
            return event
    return None


def newest_attempt(path: str) -> int | None:
    """Return the number of the last attempt in a file of events."""
    event = newest_event(path, "attempt")
    return None if event is None or not isinstance(event.get("attempt"), int) else int(event["attempt"])
