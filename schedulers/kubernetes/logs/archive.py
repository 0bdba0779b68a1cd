"""Archives of pod logs in the job's directory. The cluster deletes the logs with the pods.

`logs/NAME.kept`: one run of a container, as the kubelet sends it, after a line of JSON with its `Source`. The
process that writes to it holds its lock.
`logs/NAME.missing`: why that log is incomplete.
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
from .cursor import Piece, Position, Stamped, written
from .sources import Source
from .streams import Tail, fetch

if TYPE_CHECKING:
    from ..client.api import Api
    from ..native_id import Native

_AT_ONCE = 16
_LONGEST_S = 30.0  # a cancel waits for the logs no longer
_MOST = 256 << 20  # bytes of one log
_CHUNK = 1 << 16
_LOGS, _KEPT, _MISSING = "logs", ".kept", ".missing"
_ROTATED = "its log was rotated before it was read"
_SCHEMA = 1
_MARGIN_S = 30.0
_PAUSE_S = 0.1
_LATE_S = 10.0


@dataclass(frozen=True)
class Kept:
    """The archived log of one run of a container. `missing`: why its end is not there, or empty."""

    source: Source
    path: Path
    missing: str

    def pieces(self, after: Position | None) -> Iterator[Piece]:
        """Yield the pieces after that position."""
        stamped = Stamped(after)
        with self.path.open("rb") as file:
            file.readline()
            while chunk := file.read(_CHUNK):
                yield from stamped.feed(chunk)
        yield from stamped.end(complete=True)


def kept(directory: Path) -> dict[str, Kept]:
    """Return the logs archived in a job's directory, by the names that cursors use."""
    found = {}
    for path in sorted(directory.glob(f"{_LOGS}/*{_KEPT}")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # cut short as it was begun
            with path.open("rb") as file:
                header = json.loads(file.readline())
            source = Source(**header["source"])
            reason = path.with_suffix(_MISSING)
            found[source.name] = Kept(source, path, reason.read_text().strip() if reason.exists() else "")
    return found


def finished(log: Kept) -> Kept:
    """Wait, up to 10 s, until nobody writes to the log of a deleted pod, and return it."""
    deadline = time.monotonic() + _LATE_S
    with contextlib.suppress(OSError), log.path.open("rb") as file:
        while not _locked(file.fileno(), fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S / 5)
    return kept(log.path.parent.parent).get(log.source.name, log)


def keep(api: Api, native: Native, directory: Path) -> str | None:
    """Archive the job's logs, and continue in threads while the pods terminate. Call it before the job is deleted.

    Returns a message if something could not be archived. Never raises, and takes 30 s at most. The threads end
    with the pods or with this process.
    """
    try:
        found = [source for source in sources.of(query.pods_of(api, native)) if not source.lost]
        (directory / _LOGS).mkdir(parents=True, exist_ok=True)
    except (SchedulerError, OSError) as error:
        return f"what the job wrote is not kept: {error}"
    if not found:
        return None
    keepers = [_Keeper(api, native, source, directory / _LOGS) for source in found]
    pool = ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(keepers)), thread_name_prefix="keeping logs")
    try:
        _, late = wait([pool.submit(keeper.begin) for keeper in keepers], timeout=_LONGEST_S)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    problems = [keeper.problem for keeper in keepers if keeper.problem]
    if late:
        problems.append(f"{len(late)} of {len(keepers)} logs did not come within {_LONGEST_S:g} s")
    for keeper in keepers:
        keeper.go_on()
    return f"some of what the job wrote is not kept: {problems[0]}" if problems else None


class Archive:
    """An archive of one log, to which a follower adds the lines it reads. Never raises.

    Adds nothing after another process has written to the file: one copy of each line is enough.
    """

    def __init__(self, directory: Path, source: Source) -> None:
        self._directory, self._source = directory, source
        self._path = directory / _LOGS / f"{source.name}{_KEPT}"
        self._at: Position | None = None  # the place after what is there
        self._size = 0
        self._given_up = False
        self._lock = threading.Lock()

    def add(self, before: Position | None, pieces: Sequence[Piece]) -> None:
        """Append the pieces, which follow position `before`, unless they are there."""
        with self._lock, contextlib.suppress(OSError):
            if self._given_up:
                return
            self._given_up = True  # unless all of this succeeds
            if not self._size:
                self._open()
            self._given_up = not self._append(before, pieces)

    def note_gap(self) -> None:
        """Note that lines before the next ones may be missing."""
        if not self._given_up:
            with contextlib.suppress(OSError):
                self._path.with_suffix(_MISSING).write_text(f"{_ROTATED}\n")

    def finish(self, at: Position | None) -> None:
        """Note that the log is complete if it was archived up to `at`, its end."""
        if at is not None and self._at == at and not self._given_up:
            with contextlib.suppress(OSError):
                _note_end(self._path)

    def _open(self) -> None:
        """Open or create the archive. Raises OSError, also if the job has no directory (it is another machine's)."""
        self._path.parent.mkdir(exist_ok=True)
        known = kept(self._directory).get(self._source.name)
        if known is None:
            self._path.with_suffix(_MISSING).write_text("it was not read to its end\n")
            self._path.write_text(_header(self._source))
        for piece in known.pieces(None) if known is not None else ():
            self._at = piece.after
        self._size = self._path.stat().st_size

    def _append(self, before: Position | None, pieces: Sequence[Piece]) -> bool:
        """Append the pieces; return False if another process writes or has written to the file. Raises OSError."""
        with self._path.open("ab") as file:
            if not _locked(file.fileno(), fcntl.LOCK_EX) or os.fstat(file.fileno()).st_size != self._size:
                return False
            for piece in pieces:
                if before == self._at and self._size <= _MOST:
                    self._size += file.write(_line_of(piece))
                    self._at = piece.after
                before = piece.after
        return True


class _Keeper:
    """The archiver of one log, for a cancel."""

    def __init__(self, api: Api, native: Native, source: Source, directory: Path) -> None:
        self._api, self._native, self._source = api, native, source
        self._path = directory / f"{source.name}{_KEPT}"
        self._at: Position | None = None
        self._size = 0
        self._state = threading.Lock()
        self._alone: int | None = None  # the file, locked
        self._ready = self._given_up = False
        self.problem = ""

    def begin(self) -> None:
        """Archive all that exists now, unless an earlier cancel still does."""
        try:
            self._alone = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _locked(self._alone, fcntl.LOCK_EX):
                self._fetch()
        except OSError as error:
            self._lack(f"{self._path}: {error.strerror or error}")
        with self._state:
            if not self._ready or self._given_up:
                self._let_go()

    def _fetch(self) -> None:
        """Archive the log as it is now. Raises OSError."""
        self._open()
        answer = fetch(self._api, self._native, self._source, self._at, own=True, complete=self._source.ended)
        if answer.error is not None:
            self._lack(f"its log cannot be read: {answer.error}")
            return
        with self._path.open("ab") as file:
            self._write(file, answer.pieces())
        if answer.for_now and self._source.ended:
            self._lack("its node no longer has it")
        elif sources.lacks_beginning(self._source, self._at):
            self._note(_ROTATED)
        elif not (answer.lost or self.problem):  # as a follower has left it
            _note_end(self._path)
        self._ready = True

    def go_on(self) -> None:
        """Archive what is still to come, in a thread."""
        with self._state:
            if self._ready and not self._source.ended and not self.problem:
                threading.Thread(target=self._follow, name=f"keeping {self._source.name}", daemon=True).start()
                return
            self._given_up = True
            if self._ready:
                self._let_go()

    def _let_go(self) -> None:
        if self._alone is not None:
            os.close(self._alone)
            self._alone = None

    def _open(self) -> None:
        if self._path.stat().st_size:  # of a cancel before this one
            known = kept(self._path.parent.parent).get(self._source.name)
            if known is not None:
                for piece in known.pieces(None):
                    self._at = piece.after
                self._size = self._path.stat().st_size
                return
        self._path.write_text(_header(self._source))

    def _follow(self) -> None:
        try:
            self._read_on()
        finally:
            self._let_go()

    def _read_on(self) -> None:
        ends_at = time.monotonic() + _MARGIN_S
        while True:
            tail = Tail(self._api, self._native, self._source, self._at, own=True)
            try:
                while not tail.over:
                    self._add(tail.take())
                    time.sleep(_PAUSE_S)
                self._add(tail.take())
                if tail.error is None:
                    self._add(tail.take_last())
                    return
            except OSError as error:
                self._lack(f"{self._path}: {error.strerror or error}")
                return
            finally:
                tail.close()
            if time.monotonic() > ends_at:
                self._lack(f"its log cannot be read: {tail.error}")
                return
            time.sleep(_PAUSE_S * 5)

    def _add(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            with self._path.open("ab") as file:
                self._write(file, pieces)

    def _write(self, file: IO[bytes], pieces: Iterator[Piece] | Sequence[Piece]) -> None:
        for piece in pieces:
            if self._size > _MOST:
                self._lack(f"no more than {_MOST >> 20} MiB of it are kept")
                return
            if piece.gap:
                self._note(_ROTATED)
            data = _line_of(piece)
            file.write(data)
            self._size += len(data)
            self._at = piece.after

    def _lack(self, why: str) -> None:
        self.problem = why
        self._note(why)

    def _note(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._path.with_suffix(_MISSING).write_text(why + "\n")


def _note_end(path: Path) -> None:
    """Note that the log was read to its end. A gap before it stays noted. Raises OSError."""
    reason = path.with_suffix(_MISSING)
    if reason.exists() and reason.read_text().strip() != _ROTATED:
        reason.unlink()


def _header(source: Source) -> str:
    return json.dumps({"schema": _SCHEMA, "source": dataclasses.asdict(source)}) + "\n"


def _line_of(piece: Piece) -> bytes:
    return written(piece.after.stamp) + b" " + piece.data if piece.first else piece.data


def _locked(fd: int, how: int) -> bool:
    """Return True if the file is now locked for us, or its file system has no locks."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


__all__ = ["Archive", "Kept", "finished", "keep", "kept"]
