"""Single pods of a job: whether they run, how their containers ended, and the launcher's report of a failure."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...job import Reason
from .. import names
from . import reasons
from .reasons import Meaning

# The launcher's report of a failure, as the end of a container's log holds it.
#
# Each node's launcher names the rank that failed first on any node: the cluster's own times are too coarse. The
# wording is that of `accel/launch/failure.py`; a test compares the two.

_FIRST = re.compile(
    r"^accel launch: (?P<who>rank \d+|the launcher) on node (?P<node>\d+) \(.*?\) failed first"
    r"(, in attempt \d+)?: (?P<how>.*)$",
    re.MULTILINE,
)
_PREEMPTED = re.compile(r"^accel launch: preempted( in attempt \d+)?: (?P<why>.*) \(exit code \d+\)$", re.MULTILINE)
_OUT_OF_TIME = re.compile(r"^accel launch: the time limit of \d+ s is over", re.MULTILINE)
_TRACE = re.compile(r"^  \| (?P<line>\S.*)$", re.MULTILINE)
_FIELD = re.compile(r"^  (?P<name>error|cause|remedy): +(?P<text>.*)$", re.MULTILINE)
_ABOUT = re.compile(r"  (log|others|cause|remedy): ")
_GREETING = re.compile(r"accel launch: \d+ nodes, node 0 at ")

# A part of the cause that the report names -> what that means.
_CAUSES: Mapping[str, Reason] = {
    "memory is full": Reason.OUT_OF_MEMORY,
    "the memory limit of its control group was reached": Reason.OUT_OF_MEMORY,
    "a port that the program wants is in use": Reason.RENDEZVOUS,
    "a rank waited for others that did not come": Reason.RENDEZVOUS,
    "a package is ": Reason.SETUP,
    "this torch does not fit the GPU or driver": Reason.SETUP,
    "the command was not found": Reason.SETUP,
    "the command may not be executed": Reason.SETUP,
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A parsed failure report.

    who:  the rank that failed first and its node, in words.
    node: the number of that node; None if no rank failed.
    """

    who: str
    node: int | None
    reason: Reason
    message: str


def read_report(text: str) -> Report | None:
    """Return the last report in a text, or None."""
    if _OUT_OF_TIME.search(text):
        return Report(who="", node=None, reason=Reason.TIME_LIMIT, message="its time limit passed")
    preempted = _last(_PREEMPTED, text)
    found = _last(_FIRST, text)
    if preempted is not None and (found is None or preempted.start() > found.start()):
        return Report(who="", node=None, reason=Reason.PREEMPTED, message=preempted["why"])
    if found is None:
        return None
    rest = text[found.end() :]
    fields = {each["name"]: each["text"] for each in _FIELD.finditer(rest)}
    trace = [each["line"] for each in _TRACE.finditer(rest)]
    said = fields.get("error") or (trace[-1] if trace else found["how"])
    cause = fields.get("cause", "")
    lost = found["who"] == "the launcher"
    reason = Reason.NODE_FAILURE if lost else Reason.EXIT_CODE
    reason = next((meaning for part, meaning in _CAUSES.items() if part in cause), reason)
    return Report(
        who=f"{found['who']} on node {found['node']}",
        node=int(found["node"]),
        reason=reason,
        message=f"{said} ({cause})" if cause else said,
    )


def last_line(text: str) -> str:
    """Return the last line about the error, for a report whose beginning is cut off, or no report."""
    lines = [line for line in text.splitlines() if line.strip() and not (_ABOUT.match(line) or _GREETING.match(line))]
    return lines[-1].removeprefix("  | ").strip() if lines else ""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter([*pattern.finditer(text)][-1:]), None)


# Pods.

Object = Mapping[str, Any]

_GRACE_S = 30.0  # a pod's own default
_MARGIN_S = 10.0  # for the kill, and for news of it
_LATE_S = 60.0  # after the end of its grace, a pod that is deleted is on a node that does not answer
# The echoes of another rank's failure: the launcher was told to end, or was killed when it did not.
_ECHOES = (143, 137)


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a pod's container.

    who:   what failed first, in words: a node, or the rank that the launchers reported.
    grade: certainty that this came first, 0 the highest: 0 the cluster did it, 1 the launchers agree, 2 neither.
    """

    who: str
    node: int
    when: str
    code: int
    reason: Reason
    message: str
    grade: int = 2

    @property
    def order(self) -> tuple[int, bool, str, int]:
        """The sort key, lowest for the first failure: no echo, and the earliest. Times are in whole seconds."""
        return self.grade, self.code in _ECHOES and self.reason is Reason.EXIT_CODE, self.when, self.node

    def __str__(self) -> str:
        return joined(self.who, self.message)


def ends(pods: Sequence[Object]) -> list[End]:
    """Return one end for each failed pod."""
    found = []
    for pod in pods:
        status = pod.get("status") or {}
        words = reason_of(pod)
        known = [end for end in (last_end(each, pod) for each in containers(pod)) if end is not None]
        first = min(known, key=lambda each: each.order, default=None)
        if words is not None:
            reason, what = words
            when, code = (first.when, first.code) if first else (str(status.get("startTime") or ""), 0)
            what = joined(what, status.get("message") or disruption(pod).get("message"))
            who = f"node {node_of(pod)}"
            found.append(End(who=who, node=node_of(pod), when=when, code=code, reason=reason, message=what, grade=0))
        elif first is not None:
            found.append(first)
    return found


def last_end(container: Object, pod: Object) -> End | None:
    """Return the end of a failed container, or the previous end of one that runs again; else None."""
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated")
        if not ended or not ended.get("exitCode"):
            continue
        word, code = str(ended.get("reason") or ""), int(ended["exitCode"])
        called = str(container.get("name"))
        reason, what = reasons.TERMINATED.get(word, (Reason.EXIT_CODE, ""))
        text = str(ended.get("message") or "")
        node, when = node_of(pod), str(ended.get("finishedAt") or "")
        said = "" if word == "OOMKilled" else last_line(text)
        who, grade = f"node {node}", 2 if reason is Reason.EXIT_CODE else 0
        report = read_report(text) if called in names.MAIN else None
        if called not in names.MAIN:
            reason = Reason.SETUP
            what = "the code could not be brought" if called.startswith("accel-") else f"container {called} failed"
        elif report is not None and reason is Reason.EXIT_CODE:
            reason, said, who, grade = report.reason, report.message, report.who, 1
        elif report is not None:
            who, said = report.who, report.message
        message = joined(what or ("" if said else f"exit code {code}"), said)
        return End(who=who, node=node, when=when, code=code, reason=reason, message=message, grade=grade)
    return None


def reason_of(pod: Object) -> Meaning | None:
    """Return the reason why the cluster ended the pod, or None."""
    status = pod.get("status") or {}
    if reasons.OWN_STORAGE.search(str(status.get("message"))):
        return reasons.STORAGE
    if status.get("reason") in reasons.POD:
        return reasons.POD[str(status["reason"])]
    return reasons.DISRUPTED.get(str(disruption(pod).get("reason")))


def disruption(pod: Object) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == "DisruptionTarget" and true(each)), {})


def running(pod: Object) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp") and disruption(pod):
        return False
    return _main_runs(pod)


def _main_runs(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return any(each.get("name") in names.MAIN and (each.get("state") or {}).get("running") for each in statuses)


def not_ready(pod: Object) -> bool:
    """Return True if a running pod is not ready: its node may be lost, as its warnings would show."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return running(pod) and any(each.get("type") == "Ready" and not true(each) for each in conditions)


def alive(pod: Object, now: float) -> bool:
    """Return True for a pod that runs or may still run, unless its deletion is overdue.

    Nobody removes the pods of a lost node. `now`: seconds since the epoch.
    """
    deadline = moment((pod.get("metadata") or {}).get("deletionTimestamp"))
    return not over(pod) and (deadline is None or now < deadline + _LATE_S)


def moment(text: Any) -> float | None:
    """Parse a time of an API server (whole seconds, UTC) to seconds since the epoch; None for anything else."""
    try:
        return datetime.datetime.strptime(f"{text}+0000", "%Y-%m-%dT%H:%M:%SZ%z").timestamp()
    except ValueError:
        return None


def over(pod: Object) -> bool:
    """Return True if the main container will not restart. The kubelet reports that before the phase."""
    for each in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (each.get("state") or {}).get("terminated")
        if ended and each.get("name") in names.MAIN:
            restarts = (pod.get("spec") or {}).get("restartPolicy", "Always")
            if restarts == "Never" or (restarts == "OnFailure" and not ended.get("exitCode")):
                return True
    return phase(pod) in ("Succeeded", "Failed")


def is_ending(pod: Object, over_at: float | None, now: float) -> bool:
    """Return True if the pod runs in its grace period, after its deletion or its job's end (`over_at`)."""
    if not _main_runs(pod):
        return False
    deadline = moment((pod.get("metadata") or {}).get("deletionTimestamp"))
    if deadline is None and over_at is not None:
        deadline = over_at + float((pod.get("spec") or {}).get("terminationGracePeriodSeconds") or _GRACE_S)
    return deadline is not None and now < deadline + _MARGIN_S


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def containers(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def node_of(pod: Object) -> int:
    found = names.node_of(pod)
    return 0 if found is None else found


def name(pod: Object) -> str:
    return str((pod.get("metadata") or {}).get("name"))


def true(condition: Object) -> bool:
    return condition.get("status") == "True"


def joined(what: str, said: Any) -> str:
    text = str(said or "").strip()
    return f"{what}: {text}" if what and text else what or text
