"""Statuses of jobs from Slurm and the jobs' own files, with limits on queries to accounting."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import SchedulerError, Unreachable
from ..job import Reason, State, Status
from .cluster import Cluster
from .native_id import Native
from .states import SlurmJobInfo, status_of

_SEARCH_S = 5.0  # between two searches of accounting for a job that squeue does not list
_UNKNOWN_S = 2.0  # between two queries about a job without a status

Reply = dict[str, Any]


class StatusPoller:
    """Status queries for one target's jobs. Thread-safe.

    Each poll checks for a job's own result, which costs Slurm nothing. The rate of squeue is limited on its
    machine, for all processes there (`login/squeue_cache.py`).
    """

    def __init__(self, cluster: Cluster, clusters: str | None) -> None:
        self._cluster = cluster
        self._clusters = clusters
        self._lock = threading.Lock()
        self._accounting = True
        # Native id -> when accounting was searched for the job, the reply, and why the search failed.
        self._searched: dict[str, tuple[float, Reply, str | None]] = {}
        self._last: dict[str, tuple[float, Status | None]] = {}

    def statuses(self, native_ids: Sequence[str]) -> tuple[dict[str, Status], dict[str, str]]:
        """Return each job's status, and the reason for each that could not be queried. Jobs in neither are unknown."""
        with self._lock:
            now = time.monotonic()
            # Accounting's last answers that are not too old.
            cached = {
                native_id: self._searched[native_id][1:]
                for native_id in native_ids
                if native_id in self._searched and now - self._searched[native_id][0] < _SEARCH_S
            }
            self._last.update((native_id, (now, self._last.get(native_id, (now, None))[1])) for native_id in native_ids)
            step = {
                "op": "status",
                "jobs": [
                    {**Native.parse(native_id).to_json(), "search": native_id not in cached} for native_id in native_ids
                ],
                "accounting": self._accounting,
                "clusters": self._clusters,
            }
            reply = self._cluster.query([step])[0][0]
            if len(reply["jobs"]) != len(native_ids):
                raise SchedulerError(f"{len(reply['jobs'])} statuses returned for {len(native_ids)} jobs")
            self._accounting = reply["accounting"]
            statuses: dict[str, Status] = {}
            unreachable: dict[str, str] = {}
            for native_id, job_reply in zip(native_ids, reply["jobs"], strict=True):
                answer, problem = job_reply, reply["unreachable"]
                if job_reply["searched"]:
                    self._searched[native_id] = (now, job_reply, problem)
                elif (
                    native_id in cached and problem is None and job_reply["exit"] is None and job_reply["said"] is None
                ):
                    answer, problem = cached[native_id]
                status = _status(native_id, answer, time.time() - reply["age_s"])
                if status is not None:
                    statuses[native_id] = status
                elif problem is not None:
                    unreachable[native_id] = str(problem)
                self._last[native_id] = (now, status)
        return statuses, unreachable

    def is_over(self, native_id: str) -> bool:
        """Return True if the job was over at the last query. Queries if nothing is known."""
        with self._lock:
            polled_at, status = self._last.get(native_id, (float("-inf"), None))
        if status is None and time.monotonic() - polled_at >= _UNKNOWN_S:
            try:
                self.statuses([native_id])
            except Unreachable:
                return False
        _, status = self._last[native_id]
        return status is not None and status.state.final


def _status(native_id: str, answer: Reply, observed_at: float) -> Status | None:
    if answer["exit"] is not None:
        return Status.of_result(answer["exit"])
    if answer["said"] is not None:
        status = status_of(SlurmJobInfo(**answer["said"]))
        if status.state is State.FAILED and status.reason is Reason.EXIT_CODE and not answer["started"]:
            detail = f"; its output: {answer['words']}" if answer["words"] else ""
            message = f"its batch script exited before accel started{detail}"
            status = dataclasses.replace(status, reason=Reason.SETUP, message=message)
        attempt = max(status.attempt, answer["attempt"])
        return dataclasses.replace(status, attempt=attempt, observed_at=observed_at)
    if answer["foreign"] and not answer["started"]:
        number = Native.parse(native_id).slurm
        # It never started, and neither squeue nor accounting has a job of ours under its number.
        message = f"Slurm lost the job, perhaps in a crash of its controller: {number} is another job now"
        return Status(state=State.FAILED, reason=Reason.LOST, message=message)
    return None
