"""Logs of jobs, read from their targets into files. Any number of requests read a file by offset.

A thread reads a log while requests ask for it. Once its job is over, it is read to its end: the target may forget it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from pathlib import Path

from schedulers.errors import SchedulerError, UnknownJob
from schedulers.job import Cursor, LogLine
from schedulers.jobs.handle import Job, find
from schedulers.printable import one_line
from schedulers.store import atomic_files
from schedulers.store.store import Store

from . import spool_file
from .changes import Changes
from .settings import size_text
from .spool_file import Mark

_BATCH_BYTES = 1 << 20
_FIRST_READ_S, _LAST_READ_S = 0.1, 1.0
_IDLE_S = 30.0
_COMPLETING, _GIVE_UP_S = 4, 86_400.0
_MAX_THREADS = 200  # beyond which logs that nobody follows wait for one

_log = logging.getLogger(__name__)


class Spool:
    """The log of one job as a file, and how far it is read. Only `Spools` changes it.

    mark:     the last mark of the file.
    recent:   the last batch, and where it begins.
    finished: the number of passes over the target's log that are finished.
    problem:  why the last pass failed.
    ended:    nothing reads the log any more; ask again.
    over_at:  when the job was known to be over, 0 before: then the log is read to its end.
    """

    def __init__(self, path: str, job_id: str) -> None:
        self.path, self.job_id = path, job_id
        self.mark = spool_file.last_mark(path)
        self.recent = (self.mark.end, b"")
        self.begun = self.finished = 0
        self.problem = ""
        self.ended = self.mark.complete
        self.removed, self.over_at = False, 0.0
        self.job: Job | None = None  # for the thread only
        self.asked_at = float("-inf")
        self.asked = threading.Event()
        self.writing = threading.Lock()


class Spools:
    """The logs of a server's jobs. Thread-safe.

    directory: of the files; max_bytes: of one; ending: set once the server shuts down.
    idle_s:    seconds after the last request for which a log is read on.
    streams:   the number of open streams of each user; for the event loop only.
    """

    def __init__(
        self, store: Store, directory: Path, max_bytes: int, ending: threading.Event, idle_s: float = _IDLE_S
    ) -> None:
        self.changes = Changes()
        self.streams: Counter[str] = Counter()
        self._store, self._directory, self._max_bytes, self._ending = store, directory, max_bytes, ending
        self._idle_s = idle_s
        self._batch_bytes = min(_BATCH_BYTES, max(1, max_bytes // 16))
        self._lock = threading.Lock()
        self._spools: dict[str, Spool] = {}  # those that are read now
        self._completing = threading.Semaphore(_COMPLETING)  # for logs that nobody follows
        self._waiting: deque[str] = deque()  # the jobs of those that have no thread yet

    def read_soon(self, job_id: str, *, is_over: bool = False, now: bool = True) -> tuple[Spool, int]:
        """Start reading the job's log; return its spool and the number of the next pass.

        is_over: the job is over, for one that has no record. now: begin that pass now.
        """
        with self._lock:
            spool = self._open(job_id, is_over=is_over)
            spool.asked_at = time.monotonic()
            if now:
                spool.asked.set()
            return spool, spool.begun + 1

    def complete(self, job_id: str) -> None:
        """Read the log to its end, in a thread. To be called when a job has ended; again is harmless."""
        with self._lock:
            if job_id in self._spools or len(self._spools) < _MAX_THREADS:
                self._open(job_id, is_over=True).asked.set()
            else:
                self._waiting.append(job_id)

    def _open(self, job_id: str, *, is_over: bool) -> Spool:
        """Return the job's spool, which a thread reads unless it is complete. Needs the lock."""
        spool = self._spools.get(job_id)
        if spool is None or spool.ended:
            spool = Spool(self._path(job_id), job_id)
            if not spool.ended:
                threading.Thread(target=self._run, args=(spool,), name=f"log {job_id}", daemon=True).start()
                self._spools[job_id] = spool
        if is_over and not spool.over_at:
            spool.over_at = time.monotonic()
        return spool

    def remove(self, job_id: str) -> None:
        """Delete the log."""
        with self._lock:
            spool = self._spools.pop(job_id, None) or Spool(self._path(job_id), job_id)
        with spool.writing:
            spool.ended = spool.removed = True
            Path(spool.path).unlink(missing_ok=True)
        self.changes.notify(job_id)

    def _path(self, job_id: str) -> str:
        return str(self._directory / f"{job_id}.ndjson")

    def _run(self, spool: Spool) -> None:
        """Read the log while requests ask for it, or until it is complete."""
        pause_s = _FIRST_READ_S
        try:
            while self._begin(spool):
                began_at = time.monotonic()
                is_followed = began_at - spool.asked_at < self._idle_s
                with contextlib.nullcontext() if is_followed else self._completing:
                    has_news = self._try_to_read(spool)
                self.changes.notify(spool.job_id)
                if not spool.mark.complete:
                    pause_s = _FIRST_READ_S if has_news else min(_LAST_READ_S, pause_s * 1.5)
                    spool.asked.wait(pause_s)
                    least_s = _LAST_READ_S if spool.problem else _FIRST_READ_S
                    self._ending.wait(max(0.0, began_at + least_s - time.monotonic()))
        finally:
            with self._lock:
                spool.ended = True
                if self._spools.get(spool.job_id) is spool:
                    del self._spools[spool.job_id]
                while self._waiting and len(self._spools) < _MAX_THREADS and not self._ending.is_set():
                    self._open(self._waiting.popleft(), is_over=True)
            self.changes.notify(spool.job_id)

    def _begin(self, spool: Spool) -> bool:
        """Begin a pass, or return False if there is to be none."""
        with self._lock:
            end_at = spool.over_at + _GIVE_UP_S if spool.over_at else spool.asked_at + self._idle_s
            is_idle = time.monotonic() > end_at
            spool.ended = spool.ended or spool.mark.complete or is_idle or self._ending.is_set()
            spool.begun += not spool.ended
            spool.asked.clear()
            return not spool.ended

    def _try_to_read(self, spool: Spool) -> bool:
        """Run a pass; return True if it has read lines, or False with `problem` set if it has failed."""
        try:
            has_news, problem = self._read(spool), ""
        except Exception as error:
            if not isinstance(error, SchedulerError):
                _log.exception("the log of job %s cannot be read", spool.job_id)
            has_news, problem = False, one_line(str(error)) or type(error).__name__
        spool.problem, spool.finished = problem, spool.finished + 1
        return has_news

    def _read(self, spool: Spool) -> bool:
        """Add the lines that the job's target has now to the file; return True if there are any.

        Raises SchedulerError.
        """
        cursor = Cursor.parse(spool.mark.cursor)
        try:
            job = spool.job = spool.job or find(spool.job_id, self._store)
        except UnknownJob:  # it is not submitted yet, or never will be
            if spool.over_at:
                self._write(spool, b"", cursor, complete=True)
            return False
        is_over = job.record.reload().status.state.final  # before reading: then the lines read now are the last ones
        has_news = False
        if job.native_id is not None:
            for data in spool_file.batches(job.read_logs(cursor), cursor, self._batch_bytes):
                has_news = True
                self._write(spool, data, cursor)
                if spool.mark.end >= self._max_bytes:
                    self._write(spool, _cut_line(self._max_bytes), cursor, complete=True)
                if spool.mark.complete or spool.ended:
                    return True
        if is_over and not has_news:
            self._write(spool, b"", cursor, complete=True)
        return has_news

    def _write(self, spool: Spool, data: bytes, cursor: Cursor, *, complete: bool = False) -> None:
        """Add a batch to the file. Raises StoreError."""
        end = spool.mark.end
        data += spool_file.encode_mark(cursor, complete=complete)
        with spool.writing:
            if spool.ended:
                return
            try:
                spool_file.append(spool.path, end, data)
            except OSError as error:
                raise atomic_files.store_error(error, spool.path, "write") from error
            spool.recent = (end, data)
            spool.mark = Mark(end + len(data), str(cursor), complete)
        self.changes.notify(spool.job_id)


def _cut_line(max_bytes: int) -> bytes:
    text = f"accel serve: the log is cut here, at {size_text(max_bytes)}: raise max_log in serve.yaml for later jobs\n"
    return spool_file.encode(LogLine(rank=None, stream="missing", text=text, source="", position=""))
