"""The log of one run of a container, from the kubelet through the API server: fetched once, or followed.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#get-read-log-of-the-specified-pod
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from ...errors import SchedulerError
from ..client.errors import ApiError, Invalid, NotFound
from .cursor import ABSENT, LogChunk, Position, TimestampParser, parse_stamp
from .sources import Source

if TYPE_CHECKING:
    from ..client.api import Api, Stream
    from ..native_id import Native

_MAX_IN_MEMORY = 1 << 20
_CHUNK = 1 << 16
_LONGEST_TIME = 64
_MAX_BUFFERED = 4 << 20  # bytes
_IDLE_S = 120.0  # an unread stream ends after this time
_JOIN_S = 8.0  # a kubelet checks every 5 s that a container still runs
_JOIN_TIMEOUT_S = 0.05
_RESTART_VISIBLE_S = 3.0
_BEHIND_S = 3.0
_IDLE_AT_END_S = 1.0
_COMPLETE_S = 5.0  # a kubelet checks every 10 s whether to rotate a log

logger = logging.getLogger(__name__)


class LogResponse:
    """A fetched log, on disk if it is large.

    parser:  the parser of its chunks, which has read as far as `chunks`.
    absent:  the log no longer exists.
    for_now: the kubelet cannot find it now, but may later.
    """

    def __init__(self, after: Position | None, *, own: bool, complete: bool, greets: bool = False) -> None:
        self.error: SchedulerError | None = None
        self.absent = self.for_now = False
        self.parser = TimestampParser(after, own=own, greets=greets)
        self._complete = complete
        self._file: IO[bytes] | None = None

    @property
    def begins(self) -> bytes | None:
        """The time of the first line, or None if the log is empty."""
        if self._file is None:
            return None
        position = self._file.tell()
        self._file.seek(0)
        timestamp, space, _ = self._file.read(_LONGEST_TIME).partition(b" ")
        self._file.seek(position)
        return timestamp if space else None

    def fill(self, stream: Stream) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_MAX_IN_MEMORY)  # noqa: SIM115 (closed by `chunks`)
        for data in stream:
            self._file.write(data)
        self._file.seek(0)
        self.absent = self.for_now = ABSENT.match(self._file.read(_LONGEST_TIME)) is not None
        self._file.seek(0)

    def chunks(self) -> Iterator[LogChunk]:
        """Yield the chunks after the position. Can be called once."""
        if self._file is None:
            return
        with self._file as file:
            while data := file.read(_CHUNK):
                yield from self.parser.feed(data)
        yield from self.parser.end(complete=self._complete)

    def close(self) -> None:
        """Close the file, even if it was not read."""
        if self._file is not None:
            self._file.close()


def fetch(
    api: Api,
    native: Native,
    source: Source,
    after: Position | None,
    *,
    own: bool = True,
    complete: bool,
    limit_bytes: int | None = None,
) -> LogResponse:
    """Fetch the current log after that position, or its first `limit_bytes` bytes. Does not raise.

    own:      False if the position is one in the container's previous run.
    complete: include a last line without an ending.
    """
    fetched = LogResponse(after, own=own, complete=complete, greets=source.greets)
    try:
        stream = _open(api, native, source, after if own else None, follow=False, limit_bytes=limit_bytes)
        with contextlib.closing(stream):
            fetched.fill(stream)
    except NotFound:
        fetched.absent = True
    except Invalid as error:
        # "container … is waiting to start: …" if there is no log yet; "previous terminated container … not found" and
        # "container … is terminated" if the kubelet has removed it.
        is_gone = "not found" in str(error) or "is terminated" in str(error)
        fetched.absent = is_gone and "waiting to start" not in str(error)
    except SchedulerError as error:
        fetched.error = error
    except OSError as error:
        detail = f"{tempfile.gettempdir()}: {(error.strerror or str(error)).lower()}"
        fetched.error = SchedulerError(f"{api.label}: output of {source.writer()} cannot be buffered: {detail}")
    return fetched


class ContainerLogStream:
    """A daemon thread that follows a log and buffers it for its reader.

    at:      the reader's position.
    holder:  the current reader; another one at the same position has a stream of its own.
    over:    the stream has ended.
    error:   the error that ended it; None if the log ended.
    behind:  the last line arrived with a larger delay than earlier ones.
    opened:  the kubelet has chosen the run whose log it sends.
    run_confirmed: the API server has then confirmed that it is the source's run.
    """

    def __init__(self, api: Api, native: Native, source: Source, after: Position | None, *, own: bool) -> None:
        self.source = source
        self.at: Position | None = after if own else None
        self.started_at = time.monotonic()
        self.over = False
        self.error: SchedulerError | None = None
        self.run_confirmed = source.is_final or source.previous
        self._is_certain = self.run_confirmed
        self.opened = False
        self.holder: object | None = None
        self._api, self._native = api, native
        self._after, self._same_run = after, own
        self._parser = TimestampParser(after, own=own, greets=source.greets)
        self._pace = _LagEstimator()
        self._lock = threading.Condition()
        self._chunks: list[LogChunk] = []
        self._last: list[LogChunk] = []
        self._waiting = 0
        self._stream: Stream | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"reading {source.name}", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> bool:
        return self._pace.behind

    @property
    def may_be_stale(self) -> bool:
        """True if another run may have begun that the API server does not know yet."""
        return self._parser.lost and not self._is_certain

    @property
    def needs_check(self) -> bool:
        """True if it must be checked now that its run is still the current one."""
        if not self.opened or self._is_certain:
            return False
        return not self.run_confirmed or (self._parser.lost and time.monotonic() - self.started_at > _RESTART_VISIBLE_S)

    def mark_checked(self) -> None:
        """Note that the run was checked just now."""
        self._is_certain = self._parser.lost and self.run_confirmed
        self.run_confirmed = True

    def take(self) -> list[LogChunk]:
        """Return the chunks since the last call."""
        with self._lock:
            chunks, self._chunks, self._waiting = self._chunks, [], 0
            self._lock.notify_all()
        if chunks:
            self.at = chunks[-1].after
        return chunks

    def take_last(self) -> list[LogChunk]:
        """Return the line that had no ending when the log ended."""
        last, self._last = self._last, []
        if last:
            self.at = last[-1].after
        return last

    def close(self) -> None:
        """Close the stream. `take` still returns buffered chunks."""
        with self._lock:
            self._closed = True
            stream = self._stream
            self._lock.notify_all()
        if stream is not None:
            stream.close()

    def rest(self) -> Iterator[LogChunk]:
        """Yield the chunks until the log's end, or until none comes for 8 s."""
        last = time.monotonic()
        while not self.over and time.monotonic() - last < _JOIN_S:
            chunks = self.take()
            if chunks:
                last = time.monotonic()
                yield from chunks
            else:
                self._thread.join(_JOIN_TIMEOUT_S)
        yield from self.take()

    def _run(self) -> None:
        try:
            self._read()
        except SchedulerError as error:
            self.error = error
        except Exception as error:
            logger.exception("reading %s failed", self.source.name)
            self.error = ApiError(f"reading {self.source.name} failed: {error}")
        finally:
            self.over = True

    def _read(self) -> None:
        stream = _open(self._api, self._native, self.source, self._after if self._same_run else None, follow=True)
        with self._lock:
            self._stream = stream
        self.opened = True
        with contextlib.closing(stream):
            waiting_since = time.monotonic()
            for data in stream if not self._closed else ():
                idle_s = time.monotonic() - waiting_since
                if not self._put(list(self._with_gaps(self._parser.feed(data), idle_s))):
                    return
                waiting_since = time.monotonic()
        if not self._closed:
            self._last = self._parser.end(complete=True)
            if self._parser.absent:
                self.error = NotFound(f"{self._api.label}: the kubelet has no log of {self.source.name}")

    def _with_gaps(self, chunks: Sequence[LogChunk], idle_s: float) -> Iterator[LogChunk]:
        """Yield the chunks, with a gap where the kubelet has skipped lines.

        The kubelet skips silently for a reader two rotations behind, but not for one that waited for the first chunk.
        """
        for number, chunk in enumerate(chunks):
            previous = self._pace.last
            is_leap = self._pace.leaps(chunk.after)
            if (
                is_leap
                and (number or idle_s < _IDLE_AT_END_S)
                and previous is not None
                and not self._contains(previous)
            ):
                chunk = dataclasses.replace(chunk, gap=True)
            yield chunk

    def _contains(self, position: Position) -> bool:
        """Return True if the log still contains the position, so the stream has skipped nothing after it."""
        fetched = fetch(self._api, self._native, self.source, position, complete=False, limit_bytes=_LONGEST_TIME)
        with contextlib.closing(fetched):
            if fetched.error is not None or fetched.absent:
                return True
            timestamp = fetched.begins
            stamp = parse_stamp(timestamp) if timestamp is not None else None
            is_contained = timestamp is not None and (stamp is None or stamp <= position.stamp)
        if is_contained:
            self._pace.note_complete()
        return is_contained

    def _put(self, chunks: list[LogChunk]) -> bool:
        """Buffer the chunks. Return False after `close`, or if no reader collects them for 120 s."""
        with self._lock:
            self._chunks += chunks
            self._waiting += sum(len(chunk.data) for chunk in chunks)
            while self._waiting > _MAX_BUFFERED and not self._closed:
                if not self._lock.wait(_IDLE_S):
                    return False
            return not self._closed


class _LagEstimator:
    """The delay of a reader behind the writer, by the lines' times and this machine's clock, which may differ.

    last: the position after the previous line.
    """

    def __init__(self) -> None:
        self.last: Position | None = None
        self._second, self._last_written_at, self._read = "", 0.0, 0.0
        self._min_lag = float("inf")
        self._complete_until = time.monotonic() + _COMPLETE_S

    @property
    def behind(self) -> bool:
        return self._read - self._last_written_at - self._min_lag > _BEHIND_S

    def note_complete(self) -> None:
        """Note that no line is missing for 5 s: the kubelet does not rotate a log twice in that time."""
        self._complete_until = time.monotonic() + _COMPLETE_S

    def leaps(self, position: Position) -> bool:
        """Return True if the line was written long after the previous one but arrived soon after it."""
        self.last, second = position, position.stamp[:15]
        now = time.time()
        if second == self._second:
            self._read = now
            return False
        written, last_written, read = position.seconds, self._last_written_at, self._read
        first = not self._second
        self._second, self._last_written_at, self._read = second, written, now
        self._min_lag = min(self._min_lag, now - written)
        leap = written - last_written - (now - read)
        return not first and leap > _BEHIND_S and time.monotonic() > self._complete_until


def _open(
    api: Api, native: Native, source: Source, after: Position | None, *, follow: bool, limit_bytes: int | None = None
) -> Stream:
    query = {"container": source.container, "timestamps": "true"}
    if after is not None:
        query["sinceTime"] = after.since
    if source.previous:
        query["previous"] = "true"
    if limit_bytes is not None:
        query["limitBytes"] = str(limit_bytes)
    if follow:
        query["follow"] = "true"
    path = api.path("v1", "pods", source.pod, "log", native.namespace)
    return api.stream(path, query=query, idle_s=_IDLE_S)
