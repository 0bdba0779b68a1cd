"""Positions in a container's log, from which a reader resumes exactly.

The kubelet writes a time with nanoseconds before each line, and can begin at a given second: see `timestamps` and
`sinceTime` in https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/. Two lines may have
the same time, and lines of stdout and stderr may be slightly out of order. So a position counts the lines of one
time, and is searched for in the order of the log.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import SpecError
from ...store import log_lines
from ...store.log_lines import MAX_BYTES

_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)\Z")
_POSITION = re.compile(r"(?P<stamp>\d{8}T\d{6}\.\d{9}Z)/(?P<lines>\d+)/(?P<bytes>\d+)(?P<ungreeted>/ungreeted)?\Z")
_HEAD = 32  # the bytes of a line that show its writer
# The first line of every launcher in a pod: see `_start_message` in accel/launch/plan.py. Only the dynamic linker and
# the interpreter write before it.
LAUNCH_LINE = re.compile(rb"accel launch: (\d+ nodes, node 0 |started on )")
_LAUNCH_LINE_WITHIN = 64 << 10  # bytes
# A launcher's last line, about the end of its ranks (`headline` in accel/launch/failure.py); its first came before.
_REPORT = re.compile(rb"accel launch: (rank \d|the launcher on|preempted)")
_MAX_KUBELET_LINES, _MAX_KUBELET_LINE = 16, 500  # lines, and bytes of each, in place of a log
# The kubelet's reply, with status 200, in place of a log that it does not have:
# https://github.com/kubernetes/kubernetes/blob/master/pkg/kubelet/kuberuntime/kuberuntime_container.go
ABSENT = re.compile(rb"unable to retrieve container logs for |failed to try resolving symlinks in path ")
# A line this much later than the searched position shows that the position is no longer in the log.
_DISORDER_NS = 1_000_000_000


@dataclass(frozen=True)
class Position:
    """A position in a log: after `lines` lines with the time `stamp`, and `bytes` bytes of the next such line.

    If both are 0, it lies before everything written at that time or later.

    before_launch_line: the log was read from its beginning up to here without the launcher's first line.
    """

    stamp: str  # in UTC, of fixed length: 20261121T163300.123456789Z
    lines: int = 0
    bytes: int = 0
    before_launch_line: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.stamp}/{self.lines}/{self.bytes}{'/ungreeted' if self.before_launch_line else ''}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse the output of `str`. Raises SpecError."""
        match = _POSITION.match(text)
        if match is None:
            raise SpecError(f"not a position in a log: {text!r}")
        return cls(match["stamp"], int(match["lines"]), int(match["bytes"]), match["ungreeted"] is not None)

    @classmethod
    def at(cls, when: float) -> Position:
        """Return the position before everything written at that time (seconds since the epoch), to the second."""
        moment = datetime.datetime.fromtimestamp(int(when), datetime.timezone.utc)
        return cls(f"{moment:%Y%m%dT%H%M%S}.000000000Z")

    @property
    def seconds(self) -> float:
        """The time in seconds since the epoch."""
        return _nanoseconds(self.stamp) / 1e9

    @property
    def is_time(self) -> bool:
        return not self.lines and not self.bytes

    @property
    def since(self) -> str:
        """The `sinceTime` whose response includes this position and everything after it."""
        moment = _moment(self.stamp) - datetime.timedelta(seconds=1)
        return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def parse_stamp(token: bytes) -> str | None:
    """Return the stamp for a time in the kubelet's format; None for anything else."""
    match = _STAMP.match(token)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = (part.decode() if part else "" for part in match.groups())
    if zone != "Z":
        local_time = datetime.datetime.fromisoformat(f"{year}-{month}-{day}T{hour}:{minute}:{second}{zone}")
        return f"{local_time.astimezone(datetime.timezone.utc):%Y%m%dT%H%M%S}.{fraction:0<9}Z"
    return f"{year}{month}{day}T{hour}{minute}{second}.{fraction:0<9}Z"


def format_stamp(stamp: str) -> bytes:
    """Return the time in the kubelet's format."""
    day, time = stamp[:8], stamp[9:]
    return f"{day[:4]}-{day[4:6]}-{day[6:]}T{time[:2]}:{time[2:4]}:{time[4:]}".encode()


def _moment(stamp: str) -> datetime.datetime:
    return datetime.datetime.strptime(stamp[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.timezone.utc)


def _nanoseconds(stamp: str) -> int:
    return int(_moment(stamp).timestamp()) * 1_000_000_000 + int(stamp[16:25])


@dataclass(frozen=True)
class LogChunk:
    r"""A line, a part of one that ends with `\r`, or a part of one that is too long.

    head:    the beginning of the line.
    first:   the chunk is the beginning of the line.
    after:   the position just after the chunk.
    partial: the chunk has no line ending, and the next chunk continues the line.
    gap:     lines before the chunk may be missing: the node removed them before they were read.
    """

    data: bytes
    head: bytes
    first: bool
    after: Position
    partial: bool = False
    gap: bool = False


class TimestampParser:
    """An incremental parser of the kubelet's log stream. Skips everything up to the position `after`.

    own:    False if `after` is a position in the container's previous run. This log contains it only if its lines
            were attributed to that run.
    greets: the log begins with the launcher's first line.
    lost:   the position is no longer in the log, so lines after it may have been removed; or a log that `greets`
            lacks the launcher's first line, so its beginning may have been.
    has_unreported_gap: there is a gap that no chunk has reported, since none followed it.
    kubelet_lines: the kubelet's message in place of a log. A response that begins inside a line has none: the kubelet
            splits lines after 16 KiB and stamps only their first part.
    absent: the kubelet has no such log now.
    """

    def __init__(self, after: Position | None, *, own: bool = True, greets: bool = False) -> None:
        self._after = after
        self._same_run = own
        expects_launch_line = greets if after is None or not own else after.before_launch_line
        self._bytes_before_launch_line = 0 if expects_launch_line else None
        self.has_unreported_gap = False
        self._seeking = after is not None and not after.is_time
        self._pending: list[LogChunk] = []
        self._rest = bytearray()
        self._stamp = ""  # of the previous line
        self._lines = 0  # consecutive lines with that stamp
        self._offset: int | None = None  # in an incomplete line: the bytes before `_rest`
        self._head = b""
        self._read = 0  # the bytes of that line that were returned before
        self._started = False
        self.lost = self.absent = False
        self.kubelet_lines: list[str] = []

    def feed(self, data: bytes) -> list[LogChunk]:
        r"""Return the lines, parts that end with `\r`, and parts of long lines that `data` completes."""
        *lines, rest = data.split(b"\n")
        chunks: list[LogChunk] = []
        for line in lines:
            chunks += self._line(bytes(self._rest) + line + b"\n", complete=True)
            self._rest.clear()
        self._rest += rest
        if b"\r" in self._rest or len(self._rest) > MAX_BYTES:
            chunks += self._line(bytes(self._rest), complete=False)
        return chunks

    def end(self, *, complete: bool) -> list[LogChunk]:
        """Return the remaining chunks at the end; with `complete`, also a last line without an ending."""
        if self._stamp and self._offset is None and parse_stamp(bytes(self._rest).partition(b" ")[0]) is None:
            self._rest.clear()  # a message of the kubelet, for example about a container removed while it was followed
        # Such a message in place of a log has no line ending either.
        complete = complete or (not self._stamp and ABSENT.match(self._rest) is not None)
        chunks = self._line(bytes(self._rest), complete=True) if complete and self._rest else []
        self._rest.clear()
        if self._seeking and not self.absent:
            return self._with_gap([*self._stop_seeking(), *chunks])
        return chunks

    def _line(self, line: bytes, *, complete: bool) -> list[LogChunk]:
        """Parse the rest of a line. `_rest` then holds only the unreturned part."""
        data = line
        if self._offset is None:
            token, _, data = line.partition(b" ")
            stamp = parse_stamp(token)
            if stamp is None:
                if not self._stamp:
                    self._note_kubelet_line(line, complete)
                    return []
                stamp, data = self._stamp, line  # kubelets split long lines, and may stamp only the first part
            if stamp != self._stamp:
                self._stamp, self._lines = stamp, 0
            self._offset, self._head = 0, b""
            self.kubelet_lines, self.absent = [], False
        self._head = (self._head[: self._offset] + data[:_HEAD])[:_HEAD]
        chunks = list(self._chunks(data, self._offset, complete))
        unread = [chunk for chunk in chunks if not chunk.after.bytes or chunk.after.bytes > self._read]
        if complete:
            self._lines += 1
            self._offset, self._read = None, 0
        elif chunks:
            consumed = chunks[-1].after.bytes - self._offset
            self._rest = bytearray(data[consumed:])
            self._offset += consumed
        else:
            self._rest = bytearray(data)
        return self._with_gap(self._chunks_after_position(self._stamp, unread, complete))

    def _with_gap(self, chunks: list[LogChunk]) -> list[LogChunk]:
        """Return the chunks, with the first after a gap marked."""
        for number, chunk in enumerate(
            chunks if self.has_unreported_gap or self._bytes_before_launch_line is not None else ()
        ):
            if self._bytes_before_launch_line is not None:
                self._bytes_before_launch_line += len(chunk.data)
                if chunk.first and LAUNCH_LINE.match(chunk.head):
                    self._bytes_before_launch_line = None
                elif self._bytes_before_launch_line > _LAUNCH_LINE_WITHIN or (
                    chunk.first and _REPORT.match(chunk.head)
                ):
                    self._bytes_before_launch_line, self.lost, self.has_unreported_gap = None, True, True
            after = dataclasses.replace(chunk.after, before_launch_line=self._bytes_before_launch_line is not None)
            chunks[number] = dataclasses.replace(chunk, after=after, gap=self.has_unreported_gap)
            self.has_unreported_gap = False
        return chunks

    def _note_kubelet_line(self, line: bytes, complete: bool) -> None:
        """Record a line without a time, as a message of the kubelet.

        If the stream begins at a position, only known messages count: others are the rest of an earlier line.
        """
        if not complete:
            del self._rest[MAX_BYTES:]
            return
        absent = ABSENT.match(line) is not None
        self.absent = self.absent or absent
        if len(self.kubelet_lines) < _MAX_KUBELET_LINES and (absent or self._after is None):
            self.kubelet_lines.append(line[:_MAX_KUBELET_LINE].decode("utf-8", "replace").strip())

    def _chunks(self, data: bytes, offset: int, complete: bool) -> Iterator[LogChunk]:
        parts = data.splitlines(keepends=True) or [b""]
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            # A final `\r` may be half of `\r\n`.
            for fragment, partial in _split_lines(part, complete=complete or not last):
                first = offset == 0
                offset += len(fragment)
                is_end = complete and last and not partial
                after = Position(self._stamp, self._lines + 1) if is_end else Position(self._stamp, self._lines, offset)
                yield LogChunk(fragment, self._head, first, after, partial)

    def _chunks_after_position(self, stamp: str, chunks: list[LogChunk], complete: bool) -> list[LogChunk]:
        after = self._after
        if after is None or not self._seeking:
            is_early = after is not None and after.is_time and stamp < after.stamp
            return [] if is_early else chunks
        first, self._started = not self._started, True
        if stamp == after.stamp:
            line_number = self._lines if complete else self._lines + 1  # the number of this line, from 1
            if line_number == after.lines + (1 if after.bytes else 0):
                if not after.bytes and not complete:
                    return []
                self._seeking, self._pending = False, []
                if not after.before_launch_line:
                    self._bytes_before_launch_line = None
                if not complete:  # the chunk before the position may have been incomplete
                    self._read = after.bytes
                return [chunk for chunk in chunks if after.bytes and _is_after(chunk.after, after)]
            if line_number < after.lines:
                return []
        delay_ns = _nanoseconds(stamp) - _nanoseconds(after.stamp)
        if delay_ns > _DISORDER_NS or (first and delay_ns > 0 and not self._same_run):
            return [*self._stop_seeking(), *chunks]
        if delay_ns > 0 or not self._same_run:
            self._pending += chunks
        return []

    def _stop_seeking(self) -> list[LogChunk]:
        self._seeking = False
        self.lost = self.has_unreported_gap = self._same_run
        if self._same_run:
            self._bytes_before_launch_line = None  # the gap is reported anyway
        chunks, self._pending = self._pending, []
        return chunks


def _split_lines(part: bytes, *, complete: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield the fragments of a part, the last one only if it is complete."""
    rest = yield from log_lines.pieces(part)
    if complete:
        yield rest, False


def _is_after(position: Position, reference: Position) -> bool:
    return (position.lines, position.bytes) > (reference.lines, reference.bytes)
