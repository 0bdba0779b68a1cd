"""What a process knows of a job whose logs it reads: streams that are open, logs that have ended, archives."""

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
    """The streams are shared by all readers of the job; one at a time takes from each.

    final: source -> the place at its end, of those that nobody writes to any more ("" where it is empty).
    said:  source -> the place after what the launcher said last.
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
        """The sources that have streams, or had."""
        with self._lock:
            return list(self._tails)

    def all_tails(self) -> list[Tail]:
        with self._lock:
            return [tail for tails in self._tails.values() for tail in tails]

    def add(self, tail: Tail) -> None:
        with self._lock:
            self._tails.setdefault(tail.source.name, []).append(tail)

    def tail(self, name: str, here: Position | None, reader: object) -> Tail | None:
        """The stream of this source that stands there and that no other reader holds. It is then this reader's."""
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
