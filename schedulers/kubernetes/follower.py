"""How a target follows its jobs: states and logs from what is watched while somebody waits, and by asking otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..job import Cursor, LogLine, Status
from .logs.reader import Reader
from .status import query, watch

if TYPE_CHECKING:
    from .client.api import Api
    from .native_id import Native

logger = logging.getLogger(__name__)


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

    def statuses(self, natives: Sequence[Native]) -> tuple[dict[str, Status], dict[str, str]]:
        """The status of each job, and why, of those that could not be asked about. A job whose object is gone has
        failed: the API server is certain of it. Raises an ApiError when the server refuses the question."""
        found, silent = query.statuses(self._api, natives, ttl=self._ttl)
        over = {native for native, status in found.items() if status.state.final}
        self._over |= over
        for native in natives:
            if str(native) in over:
                watch.release(self._api, native)
        return found, silent

    def wait(self, native: Native, timeout_s: float) -> bool | None:
        """Until the job may be over. Watches are opened, and stay open while somebody asks.

        Who waits and does not read the logs is told where they will be deleted with the pods.
        """
        self._reader.followed(native)
        watcher = watch.shared(self._api, native)
        news = watcher.wait(timeout_s)
        waits = self._waits[str(native)] = self._waits.get(str(native), 0) + 1
        if waits == 2 and (seen := watcher.snapshot()) is not None and _deletes_pods(seen[0] or {}):
            text = "the cluster may delete its pods, with their logs, when it ends. `accel logs -f"
            logger.warning("job %s: %s %s` archives them", native.job_id, text, native.job_id)
        return news

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
        self._reader.close()
        watch.release(self._api)


def _deletes_pods(workload: Mapping[str, Any]) -> bool:
    """Return True if the cluster deletes the job's pods some time after its end, or when its restarts are used up."""
    spec = workload.get("spec") or {}
    policy = spec.get("runPolicy") or {}
    return "ttlSecondsAfterFinished" in {**spec, **policy} or "backoffLimit" in policy


__all__ = ["Follower"]
