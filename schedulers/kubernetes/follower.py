"""How a target follows its jobs: states and logs from what is watched while somebody waits, and by asking otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..job import Cursor, LogLine, Status
from . import asking, watching
from .reading import Reader

if TYPE_CHECKING:
    from .api import Api
    from .native import Native


class Follower:
    """Of one target. Asks nothing before it is asked. Safe to use from several threads.

    ttl: the cluster removes jobs by itself some time after their end.
    """

    def __init__(self, api: Api, *, ttl: bool = False) -> None:
        self._api = api
        self._ttl = ttl
        self._reader = Reader(api)
        self._over: set[str] = set()

    def statuses(self, natives: Sequence[Native]) -> tuple[dict[str, Status], dict[str, str]]:
        """The status of each job, and why, of those that could not be asked about. A job whose object is gone has
        failed: the API server is certain of it. Raises an ApiError when the server refuses the question."""
        found, silent = asking.statuses(self._api, natives, ttl=self._ttl)
        self._over |= {native for native, status in found.items() if status.state.final}
        for native in natives:
            watcher = watching.running(self._api, native.namespace)
            if watcher is not None and str(native) in self._over:
                watcher.forget(native)
        return found, silent

    def wait(self, native: Native, timeout_s: float) -> bool | None:
        """Until the job may be over. Watches are opened, and stay open while somebody asks."""
        self._reader.followed(native)
        return watching.shared(self._api, native.namespace).wait(native, timeout_s)

    def logs(self, native: Native, since: Cursor | None, directory: Path | None) -> Iterator[LogLine]:
        """The lines that there are now; those of pods that are gone from `directory`, the job's, where they were kept.

        Raises Unreachable, and an ApiError when the server refuses the question.
        """
        return self._reader.read(native, since, directory, over=str(native) in self._over)

    def cursor_at(self, native: Native, when: float, directory: Path | None) -> Cursor:
        """Where the logs stood at that time (seconds since the epoch), to the second."""
        return self._reader.cursor_at(native, when, directory)

    def close(self) -> None:
        """Ends what was opened; it is made anew when it is needed."""
        self._reader.close()
        watching.release(self._api)


__all__ = ["Follower"]
