"""State of a job whose logs this process reads: open streams, ended logs, archives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from . import archive
from .cursor import Position
from .sources import Source
from .streams import Tail

_FOLLOWED_S = 30.0  # a job is followed for so long after somebody last waited for it


@dataclass
class FollowedJob:
    """The state of one job, shared by all of its readers. A stream has one reader at a time.

    final: source -> the position at its end, if nobody writes to it any more ("" if it is empty).
    said:  source -> the position after the launcher's last line.
    ran:   the attempts in which a rank has written something: all nodes have run.
    """

    final: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)
    seen: dict[str, Source] = field(default_factory=dict)
    archives: dict[str, archive.Archive] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    followed_at: float = float("-inf")
    ending_until: float | None = None
    _tails: dict[str, list[Tail]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def followed(self) -> bool:
        return time.monotonic() - self.followed_at < _FOLLOWED_S

    def names(self) -> list[str]:
        """Return the sources that have or had streams."""
        with self._lock:
            return list(self._tails)

    def all_tails(self) -> list[Tail]:
        with self._lock:
            return [tail for tails in self._tails.values() for tail in tails]

    def add(self, tail: Tail) -> None:
        with self._lock:
            self._tails.setdefault(tail.source.name, []).append(tail)

    def tail(self, name: str, here: Position | None, reader: object) -> Tail | None:
        """Reserve and return this source's stream at that position, if no other reader holds it."""
        with self._lock:
            for tail in self._tails.get(name, ()):
                if str(tail.at) == str(here) and tail.holder in (None, reader):
                    tail.holder = reader
                    return tail
        return None

    def release(self, reader: object) -> None:
        for tail in self.all_tails():
            if tail.holder is reader:
                tail.holder = None

    def drop(self, tail: Tail) -> None:
        """Close the stream and forget it."""
        tail.close()
        with self._lock:
            tails = self._tails.get(tail.source.name, [])
            if tail in tails:
                tails.remove(tail)
