"""Tables from Slurm's states and reasons to accel's.

https://slurm.schedmd.com/job_state_codes.html and https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from ..job import Reason, State, Status


@dataclass(frozen=True, kw_only=True)
class SlurmJobInfo:
    """One job in squeue or sacct.

    state:    as printed, `PENDING` or `CANCELLED by 1000`.
    reason:   squeue's; "" from accounting.
    code:     `exit:signal` of the job, if known.
    derived:  the highest `exit:signal` of its steps, if known.
    restarts: how often Slurm has restarted it.
    """

    state: str
    reason: str = ""
    code: str = ""
    derived: str = ""
    restarts: int = 0


_STATES: Mapping[str, tuple[State, Reason, str]] = {
    "BOOT_FAIL": (State.FAILED, Reason.NODE_FAILURE, "its nodes did not boot"),
    "CANCELLED": (State.CANCELLED, Reason.USER, ""),
    "COMPLETED": (State.SUCCEEDED, Reason.NONE, ""),
    "COMPLETING": (State.RUNNING, Reason.NONE, "it is ending"),
    "CONFIGURING": (State.QUEUED, Reason.NONE, "its nodes are being made ready"),
    "DEADLINE": (State.FAILED, Reason.TIME_LIMIT, "its deadline has passed"),
    "EXPEDITING": (State.QUEUED, Reason.NODE_FAILURE, "it is started again with priority"),
    "FAILED": (State.FAILED, Reason.EXIT_CODE, ""),
    "LAUNCH_FAILED": (State.FAILED, Reason.SETUP, "Slurm could not launch it on its nodes"),
    "NODE_FAIL": (State.FAILED, Reason.NODE_FAILURE, "one of its nodes was lost"),
    "OUT_OF_MEMORY": (State.FAILED, Reason.OUT_OF_MEMORY, "it used more memory than requested (--memory)"),
    "PENDING": (State.QUEUED, Reason.NONE, ""),
    "POWER_UP_NODE": (State.QUEUED, Reason.NONE, "its nodes are being powered up"),
    "PREEMPTED": (State.FAILED, Reason.PREEMPTED, "it was preempted; --max-restarts N lets Slurm run it again"),
    "RECONFIG_FAIL": (State.FAILED, Reason.NODE_FAILURE, "its nodes could not be reconfigured"),
    "REQUEUED": (State.QUEUED, Reason.NONE, "it is put back into the queue"),
    "REQUEUE_FED": (State.QUEUED, Reason.NONE, "it is put back into the queue"),
    "REQUEUE_HOLD": (State.QUEUED, Reason.USER, "it is held after a restart; scontrol release frees it"),
    "RESIZING": (State.RUNNING, Reason.NONE, ""),
    "RESV_DEL_HOLD": (State.QUEUED, Reason.NO_CAPACITY, "it is held: its reservation was deleted"),
    "REVOKED": (State.CANCELLED, Reason.USER, "another cluster of the federation runs it"),
    "RUNNING": (State.RUNNING, Reason.NONE, ""),
    "SIGNALING": (State.RUNNING, Reason.NONE, "it is being signalled"),
    "SPECIAL_EXIT": (State.QUEUED, Reason.USER, "it is held after a special exit; scontrol release frees it"),
    "STAGE_OUT": (State.RUNNING, Reason.NONE, "its burst buffer is being staged out"),
    "STOPPED": (State.RUNNING, Reason.USER, "it is stopped (SIGSTOP)"),
    "SUSPENDED": (State.RUNNING, Reason.PREEMPTED, "it is suspended"),
    "TIMEOUT": (State.FAILED, Reason.TIME_LIMIT, ""),
}

TIME_LIMIT_ADVICE = (
    "its time limit passed; a script that calls accelerator.checkpoint_on_preemption() in its loop saves in time, "
    "and with --max-restarts N it resumes"
)

# The end of the exit code of a job whose batch script Slurm could not start, in place of a signal.
_NOT_LAUNCHED = ":53"
_LAUNCH_ADVICE = (
    "Slurm could not launch it: its first node failed, or does not see the job's directory (`accel describe`)"
)

_RELEASE = "scontrol release frees it"

# Slurm's reason for a pending job or one that did not run: the first pattern that matches counts (some versions write
# `_` for a space). Others are shown as Slurm prints them.
_REASONS: tuple[tuple[str, Reason, str], ...] = (
    ("None", Reason.NONE, ""),
    ("Priority", Reason.NO_CAPACITY, "jobs of higher priority come first"),
    ("Resources", Reason.NO_CAPACITY, "it waits for free nodes"),
    ("BeginTime", Reason.NONE, "its begin time has not come yet"),
    ("Dependency", Reason.DEPENDENCY, "it waits for another job (--after)"),
    ("DependencyNeverSatisfied", Reason.DEPENDENCY, "a job that it depends on (--after) has failed"),
    ("JobHeldUser", Reason.USER, f"it is held; {_RELEASE}"),
    ("JobHeldAdmin", Reason.USER, "an administrator holds it"),
    ("JobHoldMaxRequeue", Reason.SETUP, f"Slurm could not launch it several times and holds it now; {_RELEASE}"),
    ("*requeued?held", Reason.SETUP, f"Slurm could not launch it, perhaps on a broken node, and holds it; {_RELEASE}"),
    ("*requeued?in?held?state", Reason.USER, f"it is held after a restart; {_RELEASE}"),
    ("JobArrayTaskLimit", Reason.NO_CAPACITY, "its sweep runs as many jobs as array_throttle allows"),
    (
        "PartitionConfig",
        Reason.NO_CAPACITY,
        "its partition can never run it: request fewer nodes or cores, or less time",
    ),
    ("PartitionNodeLimit", Reason.NO_CAPACITY, "it requests more nodes than its partition allows"),
    ("PartitionTimeLimit", Reason.NO_CAPACITY, "it requests more time than its partition allows (--time-limit)"),
    ("PartitionDown", Reason.NO_CAPACITY, "its partition is down"),
    ("PartitionInactive", Reason.NO_CAPACITY, "its partition is inactive"),
    ("BadConstraints", Reason.NO_CAPACITY, "no node can ever meet its constraints"),
    ("NodeDown", Reason.NO_CAPACITY, "a requested node is down"),
    ("ReqNodeNotAvail*", Reason.NO_CAPACITY, "requested nodes are down or reserved"),
    ("Reservation*", Reason.NO_CAPACITY, "its reservation is not usable"),
    ("Licenses", Reason.NO_CAPACITY, "it waits for licences"),
    ("InvalidAccount", Reason.SETUP, "its account is not valid"),
    ("InvalidQOS", Reason.SETUP, "its QOS is not valid"),
    ("AccountNotAllowed", Reason.SETUP, "its account may not use the partition"),
    ("QOSNotAllowed", Reason.SETUP, "its QOS may not be used there"),
    ("JobLaunchFailure", Reason.SETUP, _LAUNCH_ADVICE),
    ("RaisedSignal*", Reason.EXIT_CODE, ""),
    ("NonZeroExitCode", Reason.EXIT_CODE, ""),
    ("OutOfMemory", Reason.OUT_OF_MEMORY, "it used more memory than requested (--memory)"),
    ("TimeLimit", Reason.TIME_LIMIT, ""),
    ("SystemFailure", Reason.NODE_FAILURE, "Slurm, or a node, failed"),
    ("AssocGrp*", Reason.NO_CAPACITY, "its account has reached a limit on all its jobs"),
    ("AssocMax*", Reason.NO_CAPACITY, "it requests more than its account allows per job"),
    ("Assoc*", Reason.NO_CAPACITY, "its account has reached a limit"),
    ("MaxJobs*", Reason.NO_CAPACITY, "the limit on running jobs is reached"),
    ("QOSGrp*", Reason.NO_CAPACITY, "its QOS has reached a limit on all its jobs"),
    ("QOSMax*", Reason.NO_CAPACITY, "it has reached a limit of its QOS"),
    ("QOS*", Reason.NO_CAPACITY, "it has reached a limit of its QOS"),
)


def status_of(info: SlurmJobInfo) -> Status:
    """Return the status of a job by Slurm's record. The job has left no result of its own."""
    state_name = info.state.split()[0].rstrip("+") if info.state.split() else ""
    state, reason, message = _STATES.get(state_name, (State.RUNNING, Reason.NONE, f"Slurm says {info.state!r}"))
    cause, explanation = _explain(info.reason)
    code = None
    if state is State.QUEUED:
        reason = cause if reason is Reason.NONE else reason
        message = _join(explanation or message, info.reason) if cause is not Reason.NONE or explanation else message
    elif state is State.CANCELLED and cause is Reason.DEPENDENCY:
        state, reason, message = State.FAILED, cause, "a job that it depends on (--after) has failed"
    elif state is State.FAILED:
        # Slurm's 0:125 for out of memory is no signal. A failed job without a failed process has no code.
        code = 137 if state_name == "OUT_OF_MEMORY" else exit_code(info) or None
        if reason is Reason.EXIT_CODE and cause not in (Reason.NONE, Reason.EXIT_CODE, Reason.NO_CAPACITY):
            reason, message = cause, explanation
        if info.code.endswith(_NOT_LAUNCHED):
            code, reason, message = None, Reason.SETUP, _LAUNCH_ADVICE
        message = TIME_LIMIT_ADVICE if reason is Reason.TIME_LIMIT and not message else message
    elif state is State.SUCCEEDED:
        code = 0
    return Status(
        state=state,
        reason=reason,
        exit_code=code,
        attempt=info.restarts,
        message=message,
        native_state=info.state,
    )


def exit_code(info: SlurmJobInfo) -> int | None:
    """Return the job's exit code, 128 + N for signal N, or None if Slurm has none.

    A step's code counts if the job's own is 143: the killed peers of a failed rank exit last.
    """
    job_code, step_code = _code(info.code), _code(info.derived)
    if job_code in (None, 0, 143) and step_code not in (None, 0):
        return step_code
    return job_code


def _code(text: str) -> int | None:
    first, _, second = text.partition(":")
    if not first.isdigit():
        return None
    return 128 + int(second) if second.isdigit() and int(second) else int(first)


def _explain(reason: str) -> tuple[Reason, str]:
    name = reason.strip("()").split(",")[0].strip()
    if not name:
        return Reason.NONE, ""
    for pattern, cause, message in _REASONS:
        if fnmatch.fnmatchcase(name, pattern):
            return cause, message
    return Reason.NO_CAPACITY, ""


def _join(explanation: str, reason: str) -> str:
    slurm_reason = reason.strip("()")
    return f"{explanation} ({slurm_reason})" if explanation else slurm_reason
