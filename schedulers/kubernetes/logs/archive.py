"""Archives of pod logs in the job's directory. The cluster deletes the logs with the pods.

`logs/NAME.kept`: the log of one run of a container in the kubelet's format, after a line of JSON with its
`Source`. The writing process holds a lock on it.
`logs/NAME.missing`: the reason if that log is incomplete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ...errors import SchedulerError
from ..status import query
from . import sources
from .cursor import LogChunk, Position, TimestampParser, format_stamp
from .sources import Source
from .streams import ContainerLogStream, fetch

if TYPE_CHECKING:
    from ..client.api import Api
    from ..native_id import Native

_MAX_WORKERS = 16
_LONGEST_S = 30.0  # a cancel's limit for fetching the logs
_MAX_BYTES = 256 << 20  # bytes of one log
_CHUNK = 1 << 16
_LOGS, _ARCHIVE_SUFFIX, _MISSING_SUFFIX = "logs", ".kept", ".missing"
_ROTATED = "its log was rotated before it was read"
_SCHEMA = 1
_MARGIN_S = 30.0
_PAUSE_S = 0.1
_FLUSH_S = 10.0


@dataclass(frozen=True)
class ArchivedLog:
    """The archived log of one run of a container. `missing`: the reason if it is incomplete, or empty."""

    source: Source
    path: Path
    missing: str

    def chunks(self, after: Position | None) -> Iterator[LogChunk]:
        """Yield the chunks after that position."""
        parser = TimestampParser(after)
        with self.path.open("rb") as file:
            file.readline()
            while data := file.read(_CHUNK):
                yield from parser.feed(data)
        yield from parser.end(complete=True)


def archived_logs(directory: Path) -> dict[str, ArchivedLog]:
    """Return source name -> archived log, for all in a job's directory."""
    archived = {}
    for path in sorted(directory.glob(f"{_LOGS}/*{_ARCHIVE_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # an incomplete header
            with path.open("rb") as file:
                header = json.loads(file.readline())
            source = Source(**header["source"])
            reason = path.with_suffix(_MISSING_SUFFIX)
            archived[source.name] = ArchivedLog(source, path, reason.read_text().strip() if reason.exists() else "")
    return archived


def finished(log: ArchivedLog) -> ArchivedLog:
    """Wait up to 10 s until no process writes to the log of a deleted pod, and return it."""
    deadline = time.monotonic() + _FLUSH_S
    with contextlib.suppress(OSError), log.path.open("rb") as file:
        while not _try_lock(file.fileno(), fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S / 5)
    return archived_logs(log.path.parent.parent).get(log.source.name, log)


def archive_job(api: Api, native: Native, directory: Path) -> str | None:
    """Archive the job's logs, and continue in threads while the pods terminate. Call it before deleting the job.

    Returns a message if something could not be archived, else None. Never raises, and takes about 30 s at most. The
    threads end with the pods or with this process.
    """
    try:
        available = [source for source in sources.list_sources(query.pods_of(api, native)) if not source.lost]
        (directory / _LOGS).mkdir(parents=True, exist_ok=True)
    except (SchedulerError, OSError) as error:
        return f"the job's logs were not archived: {error}"
    if not available:
        return None
    archivers = [_LogArchiver(api, native, source, directory) for source in available]
    pool = ThreadPoolExecutor(max_workers=min(_MAX_WORKERS, len(archivers)), thread_name_prefix="keeping logs")
    try:
        _, pending = wait([pool.submit(archiver.begin) for archiver in archivers], timeout=_LONGEST_S)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    problems = [archiver.problem for archiver in archivers if archiver.problem]
    if pending:
        problems.append(f"{len(pending)} of {len(archivers)} logs did not come within {_LONGEST_S:g} s")
    for archiver in archivers:
        archiver.start()
    return f"some of the job's logs were not archived: {problems[0]}" if problems else None


class _ArchiveFile:
    """An archive of one log, and the file with the reason if it is incomplete."""

    def __init__(self, directory: Path, source: Source) -> None:
        self._directory, self._source = directory, source
        self._path = directory / _LOGS / f"{source.name}{_ARCHIVE_SUFFIX}"
        self._reason = self._path.with_suffix(_MISSING_SUFFIX)
        self._position: Position | None = None  # at the end of the file
        self._size = 0
        self._failed = False
        self._lock = threading.Lock()

    def _open(self, reason: str = "") -> None:
        """Find the end of the file, or create it, incomplete for that reason. Raises OSError."""
        archived = archived_logs(self._directory).get(self._source.name)
        if archived is None:
            if reason:
                self._reason.write_text(f"{reason}\n")
            header = {"schema": _SCHEMA, "source": dataclasses.asdict(self._source)}
            self._path.write_text(json.dumps(header) + "\n")
        for chunk in archived.chunks(None) if archived is not None else ():
            self._position = chunk.after
        self._size = self._path.stat().st_size

    def _write(self, file: IO[bytes], chunk: LogChunk) -> None:
        data = format_stamp(chunk.after.stamp) + b" " + chunk.data if chunk.first else chunk.data
        self._size += file.write(data)
        self._position = chunk.after

    def _note(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._reason.write_text(f"{reason}\n")

    def _note_end(self) -> None:
        """Record that the log was read to its end. A recorded gap stays. Raises OSError."""
        if self._reason.exists() and self._reason.read_text().strip() != _ROTATED:
            self._reason.unlink()


class Archive(_ArchiveFile):
    """An archive of one log, to which a follower adds the lines it reads. Never raises.

    Adds nothing after another process has written to the file, so no line is there twice.
    """

    def add(self, position: Position | None, chunks: Sequence[LogChunk]) -> None:
        """Append the chunks, which follow `position`, unless the file has them."""
        with self._lock, contextlib.suppress(OSError):
            if self._failed:
                return
            self._failed = True  # unless all of this succeeds
            if not self._size:
                self._path.parent.mkdir(exist_ok=True)  # fails if the job's record is on another machine
                self._open("it was not read to its end")
            self._failed = not self._append(position, chunks)

    def note_gap(self) -> None:
        """Note that lines before the next ones may be missing."""
        if not self._failed:
            self._note(_ROTATED)

    def finish(self, position: Position | None) -> None:
        """Note that the log is complete if it was archived up to `position`, its end."""
        if position is not None and self._position == position and not self._failed:
            with contextlib.suppress(OSError):
                self._note_end()

    def _append(self, position: Position | None, chunks: Sequence[LogChunk]) -> bool:
        """Append the chunks. Return False if another process writes or has written to the file. Raises OSError."""
        with self._path.open("ab") as file:
            if not _try_lock(file.fileno(), fcntl.LOCK_EX) or os.fstat(file.fileno()).st_size != self._size:
                return False
            for chunk in chunks:
                if position == self._position and self._size <= _MAX_BYTES:
                    self._write(file, chunk)
                position = chunk.after
        return True


class _LogArchiver(_ArchiveFile):
    """The archiver of one log, for a cancel."""

    def __init__(self, api: Api, native: Native, source: Source, directory: Path) -> None:
        super().__init__(directory, source)
        self._api, self._native = api, native
        self._lock_fd: int | None = None  # the file, locked
        self._is_ready = False
        self.problem = ""

    def begin(self) -> None:
        """Archive the existing lines, unless an earlier cancel's process still writes."""
        try:
            self._lock_fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _try_lock(self._lock_fd, fcntl.LOCK_EX):
                self._fetch()
        except OSError as error:
            self._record_problem(f"{self._path}: {error.strerror or error}")
        with self._lock:
            if not self._is_ready or self._failed:
                self._release()

    def _fetch(self) -> None:
        """Archive the log as it is now. Raises OSError."""
        self._open()
        fetched = fetch(self._api, self._native, self._source, self._position, own=True, complete=self._source.ended)
        if fetched.error is not None:
            self._record_problem(f"its log cannot be read: {fetched.error}")
            return
        self._add(fetched.chunks())
        if fetched.for_now and self._source.ended:
            self._record_problem("its node no longer has it")
        elif sources.is_truncated(self._source, self._position):
            self._note(_ROTATED)
        elif not (fetched.parser.lost or self.problem):
            self._note_end()
        self._is_ready = True

    def start(self) -> None:
        """Archive the remaining lines in a thread."""
        with self._lock:
            if self._is_ready and not self._source.ended and not self.problem:
                threading.Thread(target=self._follow, name=f"keeping {self._source.name}", daemon=True).start()
                return
            self._failed = True
            if self._is_ready:
                self._release()

    def _release(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _follow(self) -> None:
        try:
            self._read_rest()
        except OSError as error:
            self._record_problem(f"{self._path}: {error.strerror or error}")
        finally:
            self._release()

    def _read_rest(self) -> None:
        """Follow the log to its end. Raises OSError."""
        ends_at = time.monotonic() + _MARGIN_S
        while True:
            tail = ContainerLogStream(self._api, self._native, self._source, self._position, own=True)
            with contextlib.closing(tail):
                while not tail.over:
                    self._add(tail.take())
                    time.sleep(_PAUSE_S)
                self._add(tail.take())
                if tail.error is None:
                    self._add(tail.take_last())
                    return
            if time.monotonic() > ends_at:
                self._record_problem(f"its log cannot be read: {tail.error}")
                return
            time.sleep(_PAUSE_S * 5)

    def _add(self, chunks: Iterator[LogChunk] | Sequence[LogChunk]) -> None:
        """Append the chunks. Raises OSError."""
        if not chunks:
            return
        with self._path.open("ab") as file:
            for chunk in chunks:
                if self._size > _MAX_BYTES:
                    self._record_problem(f"at most {_MAX_BYTES >> 20} MiB of it are archived")
                    return
                if chunk.gap:
                    self._note(_ROTATED)
                self._write(file, chunk)

    def _record_problem(self, message: str) -> None:
        self.problem = message
        self._note(message)


def _try_lock(fd: int, operation: int) -> bool:
    """Return True if the file is now locked, or its file system has no locks."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
