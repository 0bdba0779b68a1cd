"""The identity of one start of a node's launcher, so that a restarted launcher does not pass for a second machine."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from schedulers.errors import SpecError
from schedulers.topology import Topology, number

from . import watchdog
from .errors import LaunchConfigError


@dataclass(frozen=True, kw_only=True)
class Incarnation:
    """One start of the launcher of one node.

    pod:      the uid of its pod; empty outside of Kubernetes.
    starts:   the number of earlier starts in that pod.
    attempt:  the job's attempt, from 0; None if unknown.
    counted:  True if a supervisor counts the attempts (ACCEL_ATTEMPT), so that two numbers can be compared.
    first_at: start of the pod's first launcher, in seconds since the epoch.
    """

    pod: str = ""
    starts: int = 0
    attempt: int | None = 0
    counted: bool = False
    first_at: float = field(default_factory=time.time, compare=False)
    host: str = field(default_factory=lambda: socket.gethostname())
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def replaces(self, other: Incarnation) -> bool:
        """Return True if this is a later start of the node that `other` was.

        A pod with another uid is a later one: its controller creates it after the earlier one is gone.
        """
        if self.pod and other.pod:
            return self.pod != other.pod or self.starts > other.starts
        both_counted = self.counted and other.counted
        return both_counted and self.attempt is not None and other.attempt is not None and self.attempt > other.attempt

    def encode(self) -> str:
        return f"{self.host} {json.dumps(asdict(self))}"

    @classmethod
    def decode(cls, text: str) -> Incarnation:
        return cls(**json.loads(text.partition(" ")[2]))


def incarnation_from_env(env: Mapping[str, str], topology: Topology) -> Incarnation:
    """Return the incarnation that the environment describes. Raises LaunchConfigError.

    The attempt is ACCEL_ATTEMPT, else ACCEL_POD_FAILURES (the failures noted on the pod by the Job), else the
    JobSet's.
    """
    return Incarnation(
        pod="" if watchdog.LAUNCH_ID in env else env.get("ACCEL_POD_UID", ""),
        attempt=_attempt(env, topology),
        counted="ACCEL_ATTEMPT" in env,
    )


def count_start(incarnation: Incarnation, env: Mapping[str, str]) -> Incarnation:
    """Count this start of a pod's container in the file ACCEL_STARTS, which lives as long as the pod."""
    if not incarnation.pod:
        return incarnation
    earlier = _earlier_starts(env.get("ACCEL_STARTS", ""), incarnation.first_at)
    attempt = None if incarnation.attempt is None else incarnation.attempt + len(earlier)
    first_at = earlier[0] if earlier else incarnation.first_at
    return replace(incarnation, starts=len(earlier), attempt=attempt, first_at=first_at)


def latest_attempt(incarnations: list[Incarnation]) -> int | None:
    """Return a gang's attempt, the highest of its nodes': a replaced pod counts from 0 again. None if unknown."""
    attempts = [incarnation.attempt for incarnation in incarnations if incarnation.attempt is not None]
    return max(attempts, default=None)


def _attempt(env: Mapping[str, str], topology: Topology) -> int | None:
    try:
        if "ACCEL_ATTEMPT" in env:
            return number(env, "ACCEL_ATTEMPT")
        if "ACCEL_POD_FAILURES" in env:  # empty if the cluster does not count them
            return number(env, "ACCEL_POD_FAILURES") if env["ACCEL_POD_FAILURES"] else None
    except SpecError as error:
        raise LaunchConfigError(str(error)) from None
    return topology.attempt


def _earlier_starts(path: str, now: float) -> list[float]:
    """Append this start to the file. Return the times of earlier starts."""
    earlier: list[float] = []
    if path:
        with contextlib.suppress(OSError, ValueError), open(path, "a+") as file:
            file.seek(0)
            lines = [line for line in file if line.endswith("\n")]
            earlier = [float(line) for line in lines]
            file.truncate(sum(map(len, lines)))  # a full disk has cut the last line short
            file.write(f"{now}\n")
    return earlier
