"""The job's time limit, enforced by the launcher so that the pods and their logs remain.

Kubernetes' limit on a Job deletes its pods, and the limit on a pod starts again with each pod.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from schedulers.errors import SpecError
from schedulers.topology import number

from . import watchdog
from .console import print_message
from .errors import LaunchConfigError
from .termination import TerminationReport


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A time limit.

    limit_s:   seconds from `first_at`.
    exit_code: the exit code of this node's launcher after the limit.
    first_at:  the start of this pod's first launcher, in seconds since the epoch.
    """

    limit_s: int
    exit_code: int
    first_at: float = 0.0

    def arm(self) -> None:
        """Schedule SIGALRM to this process for when the limit passes."""
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self.first_at + self.limit_s - time.time()))

    def end(self, quiet: bool, report: TerminationReport) -> int:
        """Report that the time limit has passed. Return the launcher's exit code."""
        report.record({"reason": "time_limit", "limit_s": self.limit_s, "message": "its time limit passed"})
        if not quiet:
            print_message(
                f"accel launch: the time limit of {self.limit_s} s is over; all ranks on this node were terminated"
            )
        return self.exit_code


def deadline_from_env(env: Mapping[str, str], node_rank: int) -> Deadline | None:
    """Return the deadline in ACCEL_TIME_LIMIT, with the exit code for this node in ACCEL_TIME_LIMIT_EXIT.

    None without a limit, or if another launcher enforces it. Raises LaunchConfigError.
    """
    if "ACCEL_TIME_LIMIT" not in env or watchdog.LAUNCH_ID in env:
        return None
    try:
        first, _, other_code = env.get("ACCEL_TIME_LIMIT_EXIT", "1,1").partition(",")
        code = number({"ACCEL_TIME_LIMIT_EXIT": other_code if node_rank else first}, "ACCEL_TIME_LIMIT_EXIT")
        return Deadline(limit_s=number(env, "ACCEL_TIME_LIMIT"), exit_code=code)
    except SpecError as error:
        raise LaunchConfigError(str(error)) from None
