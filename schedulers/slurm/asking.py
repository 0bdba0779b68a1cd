"""What Slurm and the job's own files say of jobs, and what it means; and how often Slurm is asked."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..job import Reason, State, Status
from .cluster import Cluster
from .native import Native
from .states import Said, status_of

_FIRST_S, _LAST_S, _SLOWER = 2.0, 30.0, 1.5

Answer = dict[str, Any]


class Queue:
    """The jobs of one target. Safe to use from several threads.

    Slurm is asked at the first poll, and then at most every 2 s, more and more seldom while nothing changes. A job's
    own result is looked for at every poll: it costs Slurm nothing.
    """

    def __init__(self, cluster: Cluster, clusters: str | None) -> None:
        self._cluster = cluster
        self._clusters = clusters
        self._lock = threading.Lock()
        self._known: dict[str, Answer] = {}
        self._pause_s = _FIRST_S
        self._ask_at = 0.0
        self._accounting = True

    def statuses(self, native_ids: Sequence[str]) -> tuple[dict[str, Status], dict[str, str]]:
        """The status of each job; and why, of those that could not be asked about. A job in neither is unknown."""
        with self._lock:
            asking = time.monotonic() >= self._ask_at or any(not self._is_known(each) for each in native_ids)
            step = {
                "op": "status",
                "jobs": [Native.parse(each).to_json() for each in native_ids],
                "ask": asking,
                "accounting": self._accounting,
                "clusters": self._clusters,
            }
            done = self._cluster.ask([step])[0][0]
            answers: dict[str, Answer] = dict(zip(native_ids, done["jobs"], strict=True))
            self._accounting = done["accounting"]
            silent = done["unreachable"]
            if not asking:
                answers = {each: _with_known(answer, self._known[each]) for each, answer in answers.items()}
            elif silent is None:
                self._remember(answers)
        found = {each: status for each, answer in answers.items() if (status := _status(each, answer)) is not None}
        unheard = [each for each in native_ids if each not in found] if silent is not None else []
        return found, dict.fromkeys(unheard, str(silent))

    def is_over(self, native_id: str) -> bool | None:
        """As was said last; None when nothing was."""
        with self._lock:
            answer = self._known.get(native_id)
        status = None if answer is None else _status(native_id, answer)
        return None if status is None else status.state.final

    def _is_known(self, native_id: str) -> bool:
        answer = self._known.get(native_id)
        return answer is not None and answer["said"] is not None

    def _remember(self, answers: Mapping[str, Answer]) -> None:
        news = any(_told(answer) != _told(self._known.get(each)) for each, answer in answers.items())
        now = time.time()
        self._known.update({each: {**answer, "at": now} for each, answer in answers.items()})
        self._pause_s = _FIRST_S if news else min(_LAST_S, self._pause_s * _SLOWER)
        self._ask_at = time.monotonic() + self._pause_s * random.uniform(0.8, 1.2)


def _told(answer: Answer | None) -> Any:
    return None if answer is None else (answer["said"], answer["attempt"], answer["exit"] is None)


def _with_known(answer: Answer, known: Answer) -> Answer:
    """What the files say now, with what Slurm said then."""
    return {**answer, **{key: known[key] for key in ("said", "foreign", "words", "at")}}


def _status(native_id: str, answer: Answer) -> Status | None:
    if answer["exit"] is not None:
        return _result(answer["exit"])
    if answer["said"] is not None:
        status = status_of(Said(**answer["said"]))
        if status.state is State.FAILED and status.reason is Reason.EXIT_CODE and not answer["started"]:
            words = f": {answer['words']}" if answer["words"] else ""
            message = f"its batch script ended before anything of accel's had begun{words}"
            status = dataclasses.replace(status, reason=Reason.SETUP, message=message)
        attempt = max(status.attempt, answer["attempt"])
        return dataclasses.replace(status, attempt=attempt, observed_at=answer.get("at", 0.0))
    if answer["foreign"] and not answer["started"]:
        number = Native.parse(native_id).slurm
        # It has never begun, and there is no job of ours under its number, now or in accounting.
        message = f"Slurm lost the job, as when its controller crashes after a submit: {number} is another job now"
        return Status(state=State.FAILED, reason=Reason.LOST, message=message)
    return None


def _result(document: Any) -> Status:
    try:
        status = Status.from_json(document)
        if status.state.final:
            return status
    except (KeyError, ValueError, TypeError, AttributeError):
        pass
    message = f"its result cannot be read: {json.dumps(document)[:200]}"
    return Status(state=State.FAILED, reason=Reason.LOST, message=message)
