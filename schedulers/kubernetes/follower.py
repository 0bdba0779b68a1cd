"""How a target follows its jobs: states and logs from what is watched while somebody waits, and by asking otherwise."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SchedulerError
from ..job import Cursor, LogLine, Status
from .logs.reader import Reader
from .status import query, watch

if TYPE_CHECKING:
    from .client.api import Api
    from .native_id import Native


_MOST_ARCHIVISTS = 16  # jobs: each has as many streams as pods
_PAUSE_S, _LAST_S = 1.0, 5.0

logger = logging.getLogger(__name__)


class _Archivist:
    """A daemon thread that reads a job's logs while somebody waits for the job: what is followed is archived."""

    def __init__(self, reader: Reader, native: Native, directory: Path) -> None:
        self._reader, self._native, self._directory = reader, native, directory
        self._stop, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"archiving {native.name}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The job is over: archive the rest."""
        self._over.set()

    def join(self, deadline: float) -> None:
        """Wait until the rest is archived, and stop at the deadline, in seconds of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._over.set()

    def _run(self) -> None:
        cursor = Cursor()
        while not self._stop.is_set() and (self._over.is_set() or self._reader.is_followed(self._native)):
            over, count = self._over.is_set(), 0
            try:
                for line in self._reader.read(self._native, cursor, self._directory, over=over):
                    cursor.advance(line)
                    count += 1
                    if self._stop.is_set():
                        return
            except SchedulerError as error:
                logger.debug("archiving %s: %s", self._native, error)
                count = 0
            if over and not count:
                return
            self._over.wait(0.0 if over else _PAUSE_S)


class Follower:
    """Of one target. Asks nothing before it is asked. Safe to use from several threads.

    ttl: the cluster removes jobs by itself some time after their end.
    """

    def __init__(self, api: Api, *, ttl: bool = False) -> None:
        self._api = api
        self._ttl = ttl
        self._reader = Reader(api)
        self._over: set[str] = set()
        self._waits: dict[str, int] = {}  # native id -> waits since its logs were read
        self._archivists: dict[str, _Archivist] = {}

    def statuses(self, natives: Sequence[Native]) -> tuple[dict[str, Status], dict[str, str]]:
        """The status of each job, and why, of those that could not be asked about. A job whose object is gone has
        failed: the API server is certain of it. Raises an ApiError when the server refuses the question."""
        found, silent = query.statuses(self._api, natives, ttl=self._ttl)
        over = {native for native, status in found.items() if status.state.final}
        self._over |= over
        self._finish([self._archivists.pop(ended) for ended in over & self._archivists.keys()])
        for native in natives:
            watcher = watch.running(self._api, native.namespace)
            if watcher is not None and str(native) in over:
                watcher.forget(native)
        return found, silent

    @staticmethod
    def _finish(archivists: Sequence[_Archivist]) -> None:
        """All at the same time, for some seconds at most: each may wait for a node that is silent."""
        for archivist in archivists:
            archivist.finish()
        deadline = time.monotonic() + _LAST_S
        for archivist in archivists:
            archivist.join(deadline)

    def wait(self, native: Native, timeout_s: float, directory: Path | None = None) -> bool | None:
        """Until the job may be over. Watches are opened, and stay open while somebody asks.

        Who waits and does not read the logs has them archived in `directory`, the job's.
        """
        self._reader.followed(native)
        waits = self._waits[str(native)] = self._waits.get(str(native), 0) + 1
        if directory is not None and waits > 1:
            self._archive(native, directory)
        return watch.shared(self._api, native.namespace).wait(native, timeout_s)

    def _archive(self, native: Native, directory: Path) -> None:
        if str(native) not in self._archivists and len(self._archivists) < _MOST_ARCHIVISTS:
            self._archivists[str(native)] = _Archivist(self._reader, native, directory)

    def logs(self, native: Native, since: Cursor | None, directory: Path | None) -> Iterator[LogLine]:
        """The lines that there are now; those of pods that are gone from `directory`, the job's, where they were kept.

        Raises Unreachable, and an ApiError when the server refuses the question.
        """
        self._waits[str(native)] = 0
        return self._reader.read(native, since, directory, over=str(native) in self._over)

    def cursor_at(self, native: Native, when: float, directory: Path | None) -> Cursor:
        """Where the logs stood at that time (seconds since the epoch), to the second."""
        return self._reader.cursor_at(native, when, directory)

    def close(self) -> None:
        """Ends what was opened; it is made anew when it is needed."""
        while self._archivists:
            self._archivists.popitem()[1].stop()
        self._reader.close()
        watch.release(self._api)


__all__ = ["Follower"]
