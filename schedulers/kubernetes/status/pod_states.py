"""Single pods of a job: whether they run, how their containers ended, and the launcher's report of a failure."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...job import Reason
from .. import names
from . import reasons
from .reasons import ReasonAndMessage

# The launcher's report (accel/launch/termination.py) in a container's termination message.
#
# Each node's launcher names the rank that failed first on any node: the cluster's times are too coarse for that. In
# pods of older versions the report is text at the end of the container's log; a test compares the wording with
# `accel/launch/failure.py`.

_FIRST = re.compile(
    r"^accel launch: (?P<who>rank \d+|the launcher) on node (?P<node>\d+) \(.*?\) failed first"
    r"(, in attempt \d+)?: (?P<how>.*)$",
    re.MULTILINE,
)
_PREEMPTED = re.compile(r"^accel launch: preempted( in attempt \d+)?: (?P<why>.*) \(exit code \d+\)$", re.MULTILINE)
_OUT_OF_TIME = re.compile(r"^accel launch: the time limit of \d+ s is over", re.MULTILINE)
_TRACE = re.compile(r"^  \| (?P<line>\S.*)$", re.MULTILINE)
_FIELD = re.compile(r"^  (?P<name>error|cause|remedy): +(?P<text>.*)$", re.MULTILINE)
_DETAIL_LINE = re.compile(r"  (log|others|cause|remedy): ")
_LAUNCH_LINE = re.compile(r"accel launch: \d+ nodes, node 0 at ")

# A phrase in the reported cause -> its reason.
_CAUSES: Mapping[str, Reason] = {
    "memory is full": Reason.OUT_OF_MEMORY,
    "the memory limit of its control group was reached": Reason.OUT_OF_MEMORY,
    "a port that the program ": Reason.RENDEZVOUS,
    "a rank timed out waiting for other ranks": Reason.RENDEZVOUS,
    "a rank waited for others that did not come": Reason.RENDEZVOUS,  # as older images report it
    "a package is ": Reason.SETUP,
    "this torch does not fit the GPU or driver": Reason.SETUP,
    "the program uses a GPU that this process does not see": Reason.SETUP,
    "two ranks use the same GPU": Reason.SETUP,
    "the job's Python cannot load the function": Reason.SETUP,
    "the command was not found": Reason.SETUP,
    "the command may not be executed": Reason.SETUP,
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A parsed failure report.

    failed_rank: the rank that failed first and its node, for messages; empty if no rank failed.
    reason:      NONE if the launcher reported only a message.
    """

    failed_rank: str
    reason: Reason
    message: str


TIME_LIMIT_PASSED = "its time limit passed"


def report_and_detail(pod: Object, container: Object, terminated: Object) -> tuple[Report | None, str]:
    """Return the launcher's report, and the detail to show without one: only the report decides on a reason."""
    metadata, text = pod.get("metadata") or {}, str(terminated.get("message") or "")
    if container.get("name") not in names.MAIN:
        return None, last_line(text)
    mark = (metadata.get("annotations") or {}).get(names.REPORT)
    if mark is None:
        return read_report(text), last_line(text)
    report = _parse(text, str(metadata.get("uid")))
    if report is None:
        return None, last_line(text)
    return report if mark == names.REPORTED and report.reason is not Reason.NONE else None, report.message


def _parse(text: str, uid: str) -> Report | None:
    """Return the report in a termination message; None for another text, such as a program's or the end of a log."""
    if _OUT_OF_TIME.match(text) and "\n" not in text:  # by an older launcher in the image; a log has more lines
        return Report(failed_rank="", reason=Reason.TIME_LIMIT, message=TIME_LIMIT_PASSED)
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(text)
        if isinstance(fields, dict) and "schema" in fields and fields.get("pod") == uid:
            failed_rank, reason = "", Reason.NONE
            if "node" in fields:
                rank = "the launcher" if fields.get("rank") is None else f"rank {fields['rank']}"
                failed_rank = f"{rank} on node {fields['node']}"
            if "reason" in fields:  # one of a newer launcher may be unknown
                reason = next((known for known in Reason if known.value == fields["reason"]), Reason.EXIT_CODE)
            return Report(failed_rank=failed_rank, reason=reason, message=str(fields.get("message") or ""))
    return None


def read_report(text: str) -> Report | None:
    """Return the last report in the log of a pod of an older version, or None."""
    if _OUT_OF_TIME.search(text):
        return Report(failed_rank="", reason=Reason.TIME_LIMIT, message=TIME_LIMIT_PASSED)
    preempted = _last(_PREEMPTED, text)
    failure = _last(_FIRST, text)
    if preempted is not None and (failure is None or preempted.start() > failure.start()):
        return Report(failed_rank="", reason=Reason.PREEMPTED, message=preempted["why"])
    if failure is None:
        return None
    rest = text[failure.end() :]
    fields = {match["name"]: match["text"] for match in _FIELD.finditer(rest)}
    trace = [match["line"] for match in _TRACE.finditer(rest)]
    message = fields.get("error") or (trace[-1] if trace else failure["how"])
    cause = fields.get("cause", "")
    launcher_lost = failure["who"] == "the launcher"
    reason = Reason.NODE_FAILURE if launcher_lost else Reason.EXIT_CODE
    reason = next((cause_reason for phrase, cause_reason in _CAUSES.items() if phrase in cause), reason)
    return Report(
        failed_rank=f"{failure['who']} on node {failure['node']}",
        reason=reason,
        message=f"{message} ({cause})" if cause else message,
    )


def last_line(text: str) -> str:
    """Return the last line about the error, for a text with an incomplete report or none."""
    lines = [
        line
        for line in text.splitlines()
        if line.strip() and not (_DETAIL_LINE.match(line) or _LAUNCH_LINE.match(line))
    ]
    return lines[-1].removeprefix("  | ").strip() if lines else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter([*pattern.finditer(text)][-1:]), None)


# Pods.

Object = Mapping[str, Any]

_GRACE_S = 30.0  # a pod's own default
_MARGIN_S = 10.0  # for the kill and its report
_DELETION_SLACK_S = 60.0  # a deleted pod that exists so long after its grace is on an unreachable node
# Exit codes that follow another rank's failure: the launcher got SIGTERM, then SIGKILL.
_ECHOES = (143, 137)


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a pod's container.

    subject: the node, or the rank that the launchers reported, for messages.
    grade:   the certainty that this came first: 0 by the cluster, 1 by the launchers' reports, 2 unknown.
    """

    subject: str
    node: int
    when: str
    code: int
    reason: Reason
    message: str
    grade: int = 2

    @property
    def order(self) -> tuple[int, bool, str, int]:
        """The sort key, lowest for the first failure. Times are in whole seconds."""
        return self.grade, self.code in _ECHOES and self.reason is Reason.EXIT_CODE, self.when, self.node

    def __str__(self) -> str:
        return join_message(self.subject, self.message)


def ends(pods: Sequence[Object]) -> list[End]:
    """Return the first end in each failed pod."""
    pod_ends = []
    for pod in pods:
        status = pod.get("status") or {}
        explanation = reason_of(pod)
        container_ends = [end for end in (last_end(entry, pod) for entry in containers(pod)) if end is not None]
        first = min(container_ends, key=lambda entry: entry.order, default=None)
        if explanation is not None:
            reason, summary = explanation
            when, code = (first.when, first.code) if first else (str(status.get("startTime") or ""), 0)
            summary = join_message(summary, status.get("message") or disruption(pod).get("message"))
            subject = f"node {node_of(pod)}"
            pod_ends.append(
                End(subject=subject, node=node_of(pod), when=when, code=code, reason=reason, message=summary, grade=0)
            )
        elif first is not None:
            pod_ends.append(first)
    return pod_ends


def last_end(container: Object, pod: Object) -> End | None:
    """Return the end of a failed container, or the previous end of one that runs again; else None."""
    for key in ("state", "lastState"):
        terminated = (container.get(key) or {}).get("terminated")
        if not terminated or not terminated.get("exitCode"):
            continue
        kubelet_reason, code = str(terminated.get("reason") or ""), int(terminated["exitCode"])
        container_name = str(container.get("name"))
        reason, summary = reasons.TERMINATED.get(kubelet_reason, (Reason.EXIT_CODE, ""))
        node, when = node_of(pod), str(terminated.get("finishedAt") or "")
        report, detail = report_and_detail(pod, container, terminated)
        detail = "" if kubelet_reason == "OOMKilled" else detail
        subject, grade = f"node {node}", 2 if reason is Reason.EXIT_CODE else 0
        if container_name not in names.MAIN:
            reason = Reason.SETUP
            summary = (
                "the code could not be delivered"
                if container_name.startswith("accel-")
                else f"container {container_name} failed"
            )
        elif report is not None and reason is Reason.EXIT_CODE:
            reason, detail, subject, grade = report.reason, report.message, report.failed_rank, 1
        elif report is not None:
            subject, detail = report.failed_rank, report.message
        message = join_message(summary or ("" if detail else f"exit code {code}"), detail)
        return End(subject=subject, node=node, when=when, code=code, reason=reason, message=message, grade=grade)
    return None


def reason_of(pod: Object) -> ReasonAndMessage | None:
    """Return the reason for which the cluster ended the pod, or None."""
    status = pod.get("status") or {}
    if reasons.OWN_STORAGE.search(str(status.get("message"))):
        return reasons.STORAGE
    if status.get("reason") in reasons.POD:
        return reasons.POD[str(status["reason"])]
    return reasons.DISRUPTED.get(str(disruption(pod).get("reason")))


def disruption(pod: Object) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or []
    disruptions = [entry for entry in conditions if entry.get("type") == "DisruptionTarget" and is_true(entry)]
    return disruptions[0] if disruptions else {}


def running(pod: Object) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp") and disruption(pod):
        return False
    return _main_runs(pod)


def _main_runs(pod: Object) -> bool:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    return any(entry.get("name") in names.MAIN and (entry.get("state") or {}).get("running") for entry in containers)


def not_ready(pod: Object) -> bool:
    """Return True if a running pod is not ready: its node may be lost."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return running(pod) and any(condition.get("type") == "Ready" and not is_true(condition) for condition in conditions)


def is_alive(pod: Object, now: float) -> bool:
    """Return True for a pod that runs or may still run, unless its deletion is overdue: its node may be lost.

    `now`: seconds since the epoch.
    """
    deadline = moment((pod.get("metadata") or {}).get("deletionTimestamp"))
    return not over(pod) and (deadline is None or now < deadline + _DELETION_SLACK_S)


def moment(text: Any) -> float | None:
    """Parse a time of an API server (whole seconds, UTC) to seconds since the epoch; None for anything else."""
    try:
        return datetime.datetime.strptime(f"{text}+0000", "%Y-%m-%dT%H:%M:%SZ%z").timestamp()
    except ValueError:
        return None


def over(pod: Object) -> bool:
    """Return True if the main container will not restart. The kubelet reports that before the phase."""
    for container_status in (pod.get("status") or {}).get("containerStatuses") or []:
        terminated = (container_status.get("state") or {}).get("terminated")
        if terminated and container_status.get("name") in names.MAIN:
            restarts = (pod.get("spec") or {}).get("restartPolicy", "Always")
            if restarts == "Never" or (restarts == "OnFailure" and not terminated.get("exitCode")):
                return True
    return phase(pod) in ("Succeeded", "Failed")


def is_ending(pod: Object, finished_at: float | None, now: float) -> bool:
    """Return True if the pod runs in its grace period, after its deletion or its job's end (`finished_at`)."""
    if not _main_runs(pod):
        return False
    deadline = moment((pod.get("metadata") or {}).get("deletionTimestamp"))
    if deadline is None and finished_at is not None:
        deadline = finished_at + float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or _GRACE_S)
    return deadline is not None and now < deadline + _MARGIN_S


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def node_of(pod: Object) -> int:
    node = names.node_of(pod)
    return 0 if node is None else node


def name(pod: Object) -> str:
    return str((pod.get("metadata") or {}).get("name"))


def is_true(condition: Object) -> bool:
    return condition.get("status") == "True"


def join_message(summary: str, detail: Any) -> str:
    text = str(detail or "").strip()
    return f"{summary}: {text}" if summary and text else summary or text
