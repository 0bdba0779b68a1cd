"""The state of a job whose logs this process reads: open streams, ended logs, archives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from .archive import Archive
from .cursor import Position
from .sources import Source
from .streams import ContainerLogStream

_FOLLOWED_S = 30.0  # a job is followed for this time after the last wait for it


@dataclass
class FollowedJob:
    """The state of one job, shared by all of its readers. A stream has one reader at a time.

    final:              source -> the position at its end, if the log has ended ("" if it is empty).
    launcher_positions: source -> the position after the launcher's last line.
    started_attempts:   the attempts in which a rank has written something, so all nodes have run.
    """

    final: dict[str, str] = field(default_factory=dict)
    launcher_positions: dict[str, str] = field(default_factory=dict)
    started_attempts: set[int] = field(default_factory=set)
    known_sources: dict[str, Source] = field(default_factory=dict)
    archives: dict[str, Archive] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    followed_at: float = float("-inf")
    termination_deadline: float | None = None
    _tails: dict[str, list[ContainerLogStream]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def followed(self) -> bool:
        return time.monotonic() - self.followed_at < _FOLLOWED_S

    def names(self) -> list[str]:
        """Return the sources that have or had streams."""
        with self._lock:
            return list(self._tails)

    def all_tails(self) -> list[ContainerLogStream]:
        with self._lock:
            return [tail for tails in self._tails.values() for tail in tails]

    def add(self, tail: ContainerLogStream) -> None:
        with self._lock:
            self._tails.setdefault(tail.source.name, []).append(tail)

    def tail(self, name: str, position: Position | None, reader: object) -> ContainerLogStream | None:
        """Reserve and return this source's stream at that position, if no other reader holds it."""
        with self._lock:
            for tail in self._tails.get(name, ()):
                if str(tail.at) == str(position) and tail.holder in (None, reader):
                    tail.holder = reader
                    return tail
        return None

    def release(self, reader: object) -> None:
        for tail in self.all_tails():
            if tail.holder is reader:
                tail.holder = None

    def drop(self, tail: ContainerLogStream) -> None:
        """Close the stream and forget it."""
        tail.close()
        with self._lock:
            tails = self._tails.get(tail.source.name, [])
            if tail in tails:
                tails.remove(tail)
