"""The report of a failure: the rank that failed first, its log, the cause and a remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accel.exit_codes import REQUEUE
from accel.known_causes import find_known_cause
from schedulers.node.redaction import redact
from schedulers.processes import signal_name

from . import limits

SCHEMA = 1

# Errors of a rank after another one has died: true, but not the cause.
_ECHO = re.compile(
    r"connection (closed|reset) by peer|broken pipe|NCCL (communicator was aborted|remote)|remote process exited"
    r"|Socket (is closed|Timeout)|recvValue failed|sendBytes failed|heartbeat.*monitor",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The exit of one rank. `code` is as `os.waitstatus_to_exitcode` returns it: -N for signal N."""

    rank: int
    local_rank: int
    pid: int
    code: int
    time: float
    error: dict[str, Any] | None = None
    log: str | None = None

    @property
    def failed_at(self) -> float:
        """The time of the exception, if there was one, else of the exit."""
        return float(self.error["time"]) if self.error and "time" in self.error else self.time

    @property
    def echo(self) -> bool:
        return self.error is not None and bool(_ECHO.search(str(self.error.get("message", ""))))

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code

    def description(self) -> str:
        if self.code < 0:
            return f"was killed by {signal_name(-self.code)} (exit code {self.exit_code})"
        return f"exited with code {self.code}"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The gang's failure, which is that of its first failed rank. Nodes exchange it as JSON."""

    rank: int | None
    node: int
    host: str
    attempt: int | None  # None if unknown
    exit_code: int
    reason: str = "exit_code"
    how: str
    message: str
    traceback: str = ""
    log: str | None = None
    cause: str = ""
    remedy: str = ""
    others: str = ""
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        field_names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in field_names})

    @property
    def _subject(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else "the launcher"

    @property
    def _has_message(self) -> bool:
        """True if the message says more than the headline."""
        return self.message not in ("", f"{self._subject} {self.how}")

    def summary(self) -> dict[str, Any]:
        """Return the fields of a `TerminationReport`, as short as their reader (`pod_states`) shows them."""
        fields = {"reason": self.reason, "exit_code": self.exit_code, "attempt": self.attempt}
        if self.reason == "preempted":
            return {**fields, "message": self.cause}
        message = self.message[:300] if self._has_message else self.how
        message = f"{message} ({self.cause})" if self.cause else message
        return {**fields, "rank": self.rank, "node": self.node, "message": message}

    def text_for(self, node: int | None, *, merged: bool = False, printed: bool = False) -> str:
        """Return a node's report: in full on node 0 and where the failure happened, else one line.

        node:    the node that reports; None in an elastic world, where every node reports as node 0 does.
        merged:  the output of all nodes is read together, so that one traceback is enough.
        printed: the merged output includes the failed rank's, with its traceback.
        """
        is_local = self.host == socket.gethostname() if node is None else node == self.node
        if not is_local and node:
            return self.headline()
        return self.text(traceback=not merged or (is_local and not printed))

    def headline(self) -> str:
        attempt = "" if self.attempt is None else f" in attempt {self.attempt}"
        if self.reason == "preempted":
            return f"accel launch: preempted{attempt}: {self.cause} (exit code {self.exit_code})"
        comma = "," if attempt else ""
        return (
            f"accel launch: {self._subject} on node {self.node} ({self.host}) failed first{comma}{attempt}: {self.how}"
        )

    def text(self, *, traceback: bool = True) -> str:
        """Return the report. Its first line is a summary."""
        if self.reason == "preempted":
            return self.headline()
        lines = [self.headline()]
        trace = self.traceback.rstrip().splitlines()[-12:] if traceback else []
        lines += [f"  | {line}" for line in trace]
        if not trace and self._has_message:
            lines.append(f"  error:  {self.message}")
        if self.cause:
            lines.append(f"  cause:  {self.cause}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        if self.log:
            lines.append(f"  log:    {self.log}")
        if self.others:
            lines.append(f"  others: {self.others}")
        return "\n".join(lines)


def first_failure(exits: Iterable[Exit], ended_at: float) -> Exit:
    """Return the exit of the rank that failed first. At least one of `exits` must have a nonzero code.

    Failures after `ended_at` were caused by the shutdown and count only if there is no other; so do echoes of
    another rank's death.
    """
    failed = [end for end in exits if end.code != 0]
    earlier = [end for end in failed if end.failed_at <= ended_at] or failed
    return min(earlier, key=lambda end: (end.echo, end.failed_at))


def diagnose(end: Exit, *, node: int, host: str, attempt: int | None, oom_kills: int, others: str) -> Failure:
    """Return the failure that `end` is, with cause and remedy if known."""
    error = end.error or {}
    secrets = _secrets()
    error_text = redact(f"{error.get('type', '')}: {error.get('message', '')}".strip(": "), secrets)
    reason, cause, remedy = _cause(end, error_text, oom_kills)
    message = error_text.splitlines()[0] if error_text else f"rank {end.rank} {end.description()}"
    return Failure(
        rank=end.rank, node=node, host=host, attempt=attempt, exit_code=end.exit_code, reason=reason,
        how=end.description(),
        message=message[:500], traceback=redact(str(error.get("traceback", "")), secrets), log=end.log,
        cause=cause, remedy=remedy, others=others, time=end.failed_at,
    )  # fmt: skip


def _secrets() -> dict[str, str]:
    """Return the job's secrets (names in `ACCEL_SECRETS`), which must not appear in stored reports."""
    names = os.environ.get("ACCEL_SECRETS", "").split(",")
    return {name: os.environ[name] for name in names if name in os.environ}


def _cause(end: Exit, error_text: str, oom_kills: int) -> tuple[str, str, str]:
    if end.code == REQUEUE:
        return "preempted", "the ranks were warned, saved a checkpoint and requested a restart", ""
    if end.code == -signal.SIGKILL and oom_kills:
        return "out_of_memory", "the kernel killed it: the memory limit of its control group was reached", \
            "smaller batches or fewer data-loader workers, or request more memory (--memory)"  # fmt: skip
    known = find_known_cause(error_text)
    if known is not None:
        return known
    if end.code in (-signal.SIGKILL, 137):
        return "exit_code", "something outside the program killed it with SIGKILL", \
            "if memory was short, the kernel's log (dmesg) says so: request more memory (--memory)"  # fmt: skip
    if end.code == 127:
        return "setup", "the command was not found", "check its name and PATH on the machine that ran it"
    if end.code == 126:
        return "setup", "the command may not be executed", "check its mode (chmod +x) and its first line"
    if end.code == -signal.SIGABRT:
        return "exit_code", "native code aborted (SIGABRT), as in gloo when tensor sizes differ between ranks", \
            "the end of the log shows where; ACCELERATE_DEBUG_MODE=1 names ranks whose tensors differ"  # fmt: skip
    if end.code < 0:
        return "exit_code", "native code crashed, or another process sent the signal", "the end of the log shows where"
    return "exit_code", "", ""


_TAIL = 16_384
_ERROR_LINE = re.compile(r"(?P<type>[A-Za-z_][\w.<>]*)(?:: ?(?P<message>.*))?\Z")
# Of the C++ runtime, as when NCCL's watchdog ends a rank.
_UNCAUGHT = re.compile(
    r"terminate called after throwing an instance of '(?:\w+::)*(?P<type>\w+)'\s+what\(\): +(?P<message>.*)"
)


def error_in_log(path: str | None, code: int) -> dict[str, Any] | None:
    """Return the error in a log's tail of a rank that has exited with ``code`` and could not report it itself.

    That is the last Python traceback or, if native code has aborted, the C++ exception.
    """
    if path is None or (code < 0 and code != -signal.SIGABRT):
        return None
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            tail = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    if code < 0:
        uncaught = list(_UNCAUGHT.finditer(tail))
        return {**uncaught[-1].groupdict(), "traceback": ""} if uncaught else None
    start = tail.rfind("Traceback (most recent call last):")
    if start < 0:
        return None
    trace = tail[start:].splitlines()
    for number, line in enumerate(trace[1:], 1):
        match = _ERROR_LINE.match(line)  # only a line that is not indented matches
        if match:
            return {
                "type": match["type"].rpartition(".")[2],
                "message": match["message"] or "",
                "traceback": "\n".join(trace[: number + 1]),
            }
    return None


def oom_kill_count() -> int:
    """Return the number of OOM kills in this control group; 0 if unknown."""
    for text in limits.cgroup_values("memory", v2="memory.events", v1="memory.oom_control"):
        with contextlib.suppress(ValueError):
            return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
    return 0
