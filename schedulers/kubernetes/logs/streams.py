"""The log of one run of a container, from the kubelet through the API server: as it is now, or as it is written.

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
from .cursor import ABSENT, Piece, Position, Stamped, stamp_of
from .sources import Source

if TYPE_CHECKING:
    from ..client.api import Api, Stream
    from ..native_id import Native

_IN_MEMORY = 1 << 20
_CHUNK = 1 << 16
_LONGEST_TIME = 64
_FULL = 4 << 20  # bytes that wait for their reader
_IDLE_S = 120.0  # a follower that has forgotten its streams loses them after so long
_JOIN_S = 8.0  # a kubelet looks every 5 s whether a container still runs
_TURN_S = 0.05
_DOUBT_S = 3.0
_BEHIND_S = 3.0
_IDLE_AT_END_S = 1.0
_SURE_S = 5.0  # a kubelet looks after 10 s again whether a log is to be rotated

logger = logging.getLogger(__name__)


class Fetched:
    """A log as it was when it was fetched, on disk if it is large.

    absent:  there is no such log any more.
    for_now: the kubelet cannot find it now, but may later.
    """

    def __init__(self, after: Position | None, *, own: bool, complete: bool, greets: bool = False) -> None:
        self.error: SchedulerError | None = None
        self.absent = self.for_now = False
        self._stamped = Stamped(after, own=own, greets=greets)
        self._complete = complete
        self._file: IO[bytes] | None = None

    @property
    def lost(self) -> bool:
        """True if the log no longer contains the position to resume from."""
        return self._stamped.lost

    @property
    def untold(self) -> bool:
        """True if there is a gap that no piece has reported."""
        return self._stamped.untold

    @property
    def said(self) -> str:
        return " ".join(self._stamped.said)

    @property
    def begins(self) -> bytes | None:
        """The time of the first line, or None if the log is empty."""
        if self._file is None:
            return None
        at = self._file.tell()
        self._file.seek(0)
        word, space, _ = self._file.read(_LONGEST_TIME).partition(b" ")
        self._file.seek(at)
        return word if space else None

    def fill(self, stream: Stream) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 (closed by `pieces`)
        for chunk in stream:
            self._file.write(chunk)
        self._file.seek(0)
        self.absent = self.for_now = ABSENT.match(self._file.read(_LONGEST_TIME)) is not None
        self._file.seek(0)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces after the position. Can be called once."""
        if self._file is None:
            return
        with self._file as file:
            while chunk := file.read(_CHUNK):
                yield from self._stamped.feed(chunk)
        yield from self._stamped.end(complete=self._complete)

    def close(self) -> None:
        """Close the file, even if its pieces were not read."""
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
    most: int | None = None,
) -> Fetched:
    """Fetch the log as it is now, after that position, or its first `most` bytes. Does not raise.

    complete: include a last line without an ending.
    """
    found = Fetched(after, own=own, complete=complete, greets=source.greets)
    try:
        stream = _open(api, native, source, after if own else None, follow=False, most=most)
        try:
            found.fill(stream)
        finally:
            stream.close()
    except NotFound:
        found.absent = True
    except Invalid as error:
        # "container … is waiting to start: …" of one that has none yet, "previous terminated container … not found",
        # and "container … is terminated" of one that the kubelet has removed.
        gone = "not found" in str(error) or "is terminated" in str(error)
        found.absent = gone and "waiting to start" not in str(error)
    except SchedulerError as error:
        found.error = error
    except OSError as error:
        why = f"{tempfile.gettempdir()}: {(error.strerror or str(error)).lower()}"
        found.error = SchedulerError(f"{api.where}: what {source.who()} cannot be kept while it is read: {why}")
    return found


class Tail:
    """A daemon thread that reads a log as it is written and buffers it for its reader.

    at:      the reader's position.
    holder:  the current reader; another one at the same position has a stream of its own.
    over:    nothing more comes.
    error:   why it broke off; None if the log ended.
    lost:    the log no longer contains the position to resume from.
    behind:  the last line came later after it was written than others before it.
    opened:  the kubelet has chosen the run whose log it sends.
    checked: the API server has then confirmed that it is this run's.
    """

    def __init__(self, api: Api, native: Native, source: Source, after: Position | None, *, own: bool) -> None:
        self.source = source
        self.at: Position | None = after if own else None
        self.begun_at = time.monotonic()
        self.over = False
        self.error: SchedulerError | None = None
        self.checked = source.settled or source.previous
        self._sure = self.checked
        self.opened = False
        self.told = False  # that it is lost
        self.holder: object | None = None
        self._api, self._native = api, native
        self._after, self._own = after, own
        self._stamped = Stamped(after, own=own, greets=source.greets)
        self._pace = _Pace()
        self._lock = threading.Condition()
        self._pieces: list[Piece] = []
        self._last: list[Piece] = []
        self._waiting = 0
        self._stream: Stream | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"reading {source.name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        return self._stamped.lost

    @property
    def behind(self) -> bool:
        return self._pace.behind

    @property
    def doubtful(self) -> bool:
        """True if another run may have begun that the API server does not know of yet."""
        return self.lost and not self._sure

    @property
    def to_be_checked(self) -> bool:
        """True if it is time to check that its run is still the current one."""
        if not self.opened or self._sure:
            return False
        return not self.checked or (self.lost and time.monotonic() - self.begun_at > _DOUBT_S)

    def note_checked(self) -> None:
        """Note that the run was checked just now."""
        self._sure = self.lost and self.checked
        self.checked = True

    def take(self) -> list[Piece]:
        """Return the pieces since the last call."""
        with self._lock:
            pieces, self._pieces, self._waiting = self._pieces, [], 0
            self._lock.notify_all()
        if pieces:
            self.at = pieces[-1].after
        return pieces

    def take_last(self) -> list[Piece]:
        """Return the line that had no ending when the log ended."""
        last, self._last = self._last, []
        if last:
            self.at = last[-1].after
        return last

    def close(self) -> None:
        """Close the stream. `take` still returns buffered pieces."""
        with self._lock:
            self._closed = True
            stream = self._stream
            self._lock.notify_all()
        if stream is not None:
            stream.close()

    def rest(self) -> Iterator[Piece]:
        """Yield the pieces until the log's end, or until none comes for 8 s."""
        last = time.monotonic()
        while not self.over and time.monotonic() - last < _JOIN_S:
            pieces = self.take()
            if pieces:
                last = time.monotonic()
                yield from pieces
            else:
                self._thread.join(_TURN_S)
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
        stream = _open(self._api, self._native, self.source, self._after if self._own else None, follow=True)
        with self._lock:
            self._stream = stream
        self.opened = True
        with contextlib.closing(stream):
            asked_at = time.monotonic()
            for chunk in stream if not self._closed else ():
                idle_s = time.monotonic() - asked_at
                if not self._put(list(self._checked(self._stamped.feed(chunk), idle_s))):
                    return
                asked_at = time.monotonic()
        if not self._closed:
            self._last = self._stamped.end(complete=True)
            if self._stamped.absent:
                self.error = NotFound(f"{self._api.where}: the kubelet has no log of {self.source.name}", status=404)

    def _checked(self, pieces: Sequence[Piece], idle_s: float) -> Iterator[Piece]:
        """Yield the pieces, with a gap where the kubelet has skipped lines.

        It does so silently for a reader two rotations behind, but not for one that waited for the first piece.
        """
        for number, piece in enumerate(pieces):
            before = self._pace.last
            leaps = self._pace.leaps(piece.after)
            if leaps and (number or idle_s < _IDLE_AT_END_S) and before is not None and not self._holds(before):
                piece = dataclasses.replace(piece, gap=True)
            yield piece

    def _holds(self, place: Position) -> bool:
        """Return True if the log still contains the position: the stream has then skipped nothing after it."""
        answer = fetch(self._api, self._native, self.source, place, complete=False, most=_LONGEST_TIME)
        with contextlib.closing(answer):
            if answer.error is not None or answer.absent:
                return True
            begins = answer.begins
            stamp = stamp_of(begins) if begins is not None else None
            held = begins is not None and (stamp is None or stamp <= place.stamp)
        if held:
            self._pace.note_sure()
        return held

    def _put(self, pieces: list[Piece]) -> bool:
        """Buffer the pieces. Return False after `close`, or if no reader collects them for 120 s."""
        with self._lock:
            self._pieces += pieces
            self._waiting += sum(len(piece.data) for piece in pieces)
            while self._waiting > _FULL and not self._closed:
                if not self._lock.wait(_IDLE_S):
                    return False
            return not self._closed


class _Pace:
    """A reader's delay behind the writer, by the times of the lines and of this machine, whose clocks may differ.

    last: the position after the previous line.
    """

    def __init__(self) -> None:
        self.last: Position | None = None
        self._second, self._written, self._read = "", 0.0, 0.0
        self._least = float("inf")
        self._sure_until = time.monotonic() + _SURE_S

    @property
    def behind(self) -> bool:
        return self._read - self._written - self._least > _BEHIND_S

    def note_sure(self) -> None:
        """Note that no line is missing for 5 s: the kubelet does not rotate a log twice in that time."""
        self._sure_until = time.monotonic() + _SURE_S

    def leaps(self, place: Position) -> bool:
        """Return True if the line was written long after the one before it but came soon after that."""
        self.last, second = place, place.stamp[:15]
        now = time.time()
        if second == self._second:
            self._read = now
            return False
        written, before, read = place.seconds, self._written, self._read
        first = not self._second
        self._second, self._written, self._read = second, written, now
        self._least = min(self._least, now - written)
        leap = written - before - (now - read)
        return not first and leap > _BEHIND_S and time.monotonic() > self._sure_until


def _open(
    api: Api, native: Native, source: Source, after: Position | None, *, follow: bool, most: int | None = None
) -> Stream:
    query = {"container": source.container, "timestamps": "true"}
    if after is not None:
        query["sinceTime"] = after.since
    if source.previous:
        query["previous"] = "true"
    if most is not None:
        query["limitBytes"] = str(most)
    if follow:
        query["follow"] = "true"
    path = api.path("v1", "pods", source.pod, "log", native.namespace)
    return api.stream(path, query=query, idle_s=_IDLE_S)


__all__ = ["Fetched", "Tail", "fetch"]
