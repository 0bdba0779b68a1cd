"""A cluster and a target's jobs there, their statuses and logs: from a watch while somebody waits, else by polling."""

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


class Follower(Reader):
    """The statuses and logs of one target's jobs in a cluster. Sends no request before its first use. Thread-safe.

    ttl: True if the cluster removes jobs some time after their end.
    """

    def __init__(self, api: Api, *, ttl: bool = False) -> None:
        super().__init__(api)
        self._ttl = ttl
        self._finished: set[str] = set()
        self._waits_since_read: dict[str, int] = {}  # native id -> waits since its logs were read

    def statuses(self, natives: Sequence[Native]) -> tuple[dict[str, Status], dict[str, str]]:
        """Return the status of each job, and the reason for each that could not be queried.

        A job whose object is gone has failed. Raises ApiError for a refused query.
        """
        statuses, unreachable = query.statuses(self.api, natives, ttl=self._ttl)
        finished = {native for native, status in statuses.items() if status.state.final}
        self._finished |= finished
        for native in natives:
            if str(native) in finished:
                watch.release(self.api, native)
        return statuses, unreachable

    def wait(self, native: Native, timeout_s: float) -> bool | None:
        """Wait until the job may be over. Watches open when first needed and stay open between waits.

        Logs a warning if the job's logs will be deleted with its pods and the caller does not read them.
        """
        self.mark_followed(native)
        watcher = watch.shared(self.api, native)
        changed = watcher.wait(timeout_s)
        wait_count = self._waits_since_read[str(native)] = self._waits_since_read.get(str(native), 0) + 1
        if wait_count == 2 and (snapshot := watcher.snapshot()) is not None and _deletes_pods(snapshot[0] or {}):
            text = "the cluster may delete its pods, with their logs, when it ends. `accel logs -f"
            logger.warning("job %s: %s %s` archives them", native.job_id, text, native.job_id)
        return changed

    def logs(self, native: Native, since: Cursor | None, directory: Path | None) -> Iterator[LogLine]:
        """Return the lines that exist now. Logs of deleted pods come from the job's `directory`, if archived there.

        Raises Unreachable, and an ApiError when the server refuses the query.
        """
        self._waits_since_read[str(native)] = 0
        return self.read(native, since, directory, finished=str(native) in self._finished)

    def close(self) -> None:
        """Close the watches and connections. They are reopened when needed."""
        super().close()
        watch.release(self.api)


def _deletes_pods(workload: Mapping[str, Any]) -> bool:
    """Return True if the cluster deletes the pods some time after the job's end, or once restarts are used up."""
    spec = workload.get("spec") or {}
    policy = spec.get("runPolicy") or {}
    return "ttlSecondsAfterFinished" in {**spec, **policy} or "backoffLimit" in policy
