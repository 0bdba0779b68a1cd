"""The `Status` of a job: its `State` and the `Reason` for it."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .convert import as_integer, as_text, as_timestamp

_LARGEST_CODE = 2**31


class State(enum.Enum):
    """The state of a job. `queued` and `running` may alternate, once per attempt; the last three are final."""

    SUBMITTING = "submitting"  # the intent is on disk, the backend has not confirmed it
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"  # written by a newer accel; read only

    @property
    def final(self) -> bool:
        """True for states that never change."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        return cls.UNKNOWN if isinstance(value, str) else None

    def may_become(self, new: State) -> bool:
        """Return True if `new` may follow. A final state never changes; no other state leads back to `submitting`."""
        return new is self or (not self.final and new is not State.SUBMITTING)


class Reason(enum.Enum):
    """The reason for a job's state; independent of `State`, and of the names that a backend has for it."""

    NONE = "none"
    EXIT_CODE = "exit_code"
    OUT_OF_MEMORY = "out_of_memory"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    NODE_FAILURE = "node_failure"
    SETUP = "setup"
    RENDEZVOUS = "rendezvous"
    NO_CAPACITY = "no_capacity"
    DEPENDENCY = "dependency"  # waits for, or did not get, a job named in `after`
    USER = "user"
    LOST = "lost"  # the backend forgot it and it left no result
    UNKNOWN = "unknown"  # written by a newer accel; read only

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        return cls.UNKNOWN if isinstance(value, str) else None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A job's status when its backend last answered.

    exit_code:   of the first rank that failed (128 + N for signal N); 0 on success; None while unknown.
    attempt:     0 for the first run, one more for every restart.
    message:     one line for people: the first error of the first failing rank, or what the job waits for.
    observed_at: seconds since the epoch; a backend that cannot be reached leaves it, and the status, unchanged.
    details:     values that only some targets have, by name; its page in docs/ lists them.
    """

    state: State
    reason: Reason = Reason.NONE
    exit_code: int | None = None
    attempt: int = 0
    message: str = ""
    native_state: str = ""
    observed_at: float = 0.0
    details: Mapping[str, str | float | None] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `details` only if there are any."""
        plain = dataclasses.asdict(self) | {"state": self.state.value, "reason": self.reason.value}
        return plain if self.details else {key: value for key, value in plain.items() if key != "details"}

    @classmethod
    def from_json(cls, data: object) -> Status:
        """Parse the result of `to_json`, ignoring unknown keys. Raises ValueError for anything else.

        A state or reason that only a newer accel knows is UNKNOWN, and named in the message.
        """
        if not isinstance(data, dict) or "state" not in data:
            raise ValueError("a status is an object with a state")
        code, details = data.get("exit_code"), data.get("details", {})
        if not isinstance(details, dict) or any(isinstance(detail, dict | list) for detail in details.values()):
            raise ValueError(f"details must be names and values, not {details!r}")
        state, reason = State(data["state"]), Reason(data.get("reason", "none"))
        message = as_text(data.get("message", ""), "message")
        for known, key in ((state, "state"), (reason, "reason")):
            if known.value == "unknown" != data[key]:
                message = f"{key} {data[key]!r} was written by a newer accel" + (f"; {message}" if message else "")
        return cls(
            state=state,
            reason=reason,
            exit_code=None if code is None else as_integer(code, "exit_code", least=-_LARGEST_CODE),
            attempt=as_integer(data.get("attempt", 0), "attempt"),
            message=message,
            native_state=as_text(data.get("native_state", ""), "native_state"),
            observed_at=as_timestamp(data.get("observed_at", 0.0), "observed_at"),
            details=details,
        )

    @classmethod
    def of_result(cls, document: object, place: str = "") -> Status:
        """Return the final status of a job from its result (parsed JSON), or `failed (lost)` for a damaged one.

        place: where the result was read, for the message, such as " on node1".
        """
        try:
            status = cls.from_json(document)
            if status.state.final:
                return status
        except ValueError:
            pass
        message = f"its result{place} cannot be read: {json.dumps(document)[:200]}"
        return cls(state=State.FAILED, reason=Reason.LOST, message=message)
