"""Identify one start of a node's launcher, so that a restarted launcher is not taken for a second machine."""

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
from .errors import Refused


@dataclass(frozen=True, kw_only=True)
class Incarnation:
    """One start of the launcher of one node.

    pod:     the uid of its pod; empty outside of Kubernetes.
    starts:  how often the launcher was started in that pod before.
    attempt: which attempt of the job this is, from 0; None where nothing can tell.
    counted: True if a supervisor counts the attempts (ACCEL_ATTEMPT), so that two numbers can be compared.
    first_at: when the first launcher of the pod was started, in seconds since the epoch.
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

        A pod with another uid came after the one that it stands for: its controller makes it once that one is gone.
        """
        if self.pod and other.pod:
            return self.pod != other.pod or self.starts > other.starts
        both = self.counted and other.counted
        return both and self.attempt is not None and other.attempt is not None and self.attempt > other.attempt

    def encode(self) -> str:
        return f"{self.host} {json.dumps(asdict(self))}"

    @classmethod
    def decode(cls, text: str) -> Incarnation:
        return cls(**json.loads(text.partition(" ")[2]))


def planned(env: Mapping[str, str], found: Topology) -> Incarnation:
    """Return what the environment says of this launch. Raises Refused.

    ACCEL_ATTEMPT counts the attempts of the job. Without it the attempt is that of the JobSet, or the failures that
    the Job has noted on the pod.
    """
    return Incarnation(
        pod="" if watchdog.LAUNCH_ID in env else env.get("ACCEL_POD_UID", ""),
        attempt=_attempt(env, found),
        counted="ACCEL_ATTEMPT" in env,
    )


def started(incarnation: Incarnation, env: Mapping[str, str]) -> Incarnation:
    """Count this start of a pod's container in ACCEL_STARTS, a file that lives as long as the pod."""
    if not incarnation.pod:
        return incarnation
    earlier = _earlier_starts(env.get("ACCEL_STARTS", ""), incarnation.first_at)
    attempt = None if incarnation.attempt is None else incarnation.attempt + len(earlier)
    first_at = earlier[0] if earlier else incarnation.first_at
    return replace(incarnation, starts=len(earlier), attempt=attempt, first_at=first_at)


def latest(incarnations: list[Incarnation]) -> int | None:
    """The attempt of a gang: the highest that one of its nodes knows. A pod that was replaced counts from 0 again."""
    known = [one.attempt for one in incarnations if one.attempt is not None]
    return max(known, default=None)


def _attempt(env: Mapping[str, str], found: Topology) -> int | None:
    try:
        if "ACCEL_ATTEMPT" in env:
            return number(env, "ACCEL_ATTEMPT")
        if "ACCEL_POD_FAILURES" in env:  # empty where the cluster does not note them
            return number(env, "ACCEL_POD_FAILURES") if env["ACCEL_POD_FAILURES"] else None
    except SpecError as error:
        raise Refused(str(error)) from None
    return found.attempt


def _earlier_starts(path: str, now: float) -> list[float]:
    """Note this start in the file. Return the times of the starts before."""
    earlier: list[float] = []
    if path:
        with contextlib.suppress(OSError, ValueError), open(path, "a+") as file:
            file.seek(0)
            lines = [line for line in file if line.endswith("\n")]
            earlier = [float(line) for line in lines]
            file.truncate(sum(map(len, lines)))  # a full disk has cut the last line short
            file.write(f"{now}\n")
    return earlier
