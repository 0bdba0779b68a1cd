"""Parser of the launcher's failure report at the end of a container's log.

Each node's launcher names the rank that failed first on any node: the cluster's own times are too coarse. The
wording is that of `accel/launch/failure.py`; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...job import Reason

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


def read(text: str) -> Report | None:
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
