"""The outcome of a start of a Slurm job, computed without side effects once its ranks have ended.

`Evidence` holds what the first node has collected; `conclude` returns what follows:

finish   the job is over, with `status`
again    it is to be requeued in Slurm under the same id
leave    Slurm restarts it by itself, or will report how it ended
"""

from __future__ import annotations

import re
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Document = dict[str, Any]

REQUEUE = 85
_TOLD = 143
# Slurm's reasons for ending a running job whose node it has lost.
# https://slurm.schedmd.com/job_reason_codes.html
_NODE_LOST = ("NodeDown", "SystemFailure")
# What a rank says when another one has gone: with a node that has fallen silent, that node is the cause.
_ECHO = re.compile(r"connection (closed|reset) by peer|broken pipe|socket|nccl|timed? ?out|node 0", re.IGNORECASE)


class Evidence:
    """The facts about a start.

    settings:    the job's.
    attempt:     the newest that has run, including restarts within this start.
    names:       the nodes' names, by rank.
    reports:     each node's final report, by rank.
    begun:       the ranks of nodes that have begun.
    overdue:     why this program has ended the ranks' step, if it has.
    told:        this program has received SIGTERM.
    cancel:      the job was cancelled through accel.
    slurm:       the record of `scontrol show job`; None if that failed.
    runs_before: earlier runs, by Slurm's count.
    srun:        its exit code.
    words:       the last line of a node without a report, or a line of srun.
    """

    def __init__(self, settings: Document, attempt: int, names: list[str]) -> None:
        self.settings = settings
        self.attempt = attempt
        self.names = names
        self.reports: dict[int, Document] = {}
        self.begun: set[int] = set()
        self.overdue: Document | None = None
        self.told = False
        self.cancel = False
        self.slurm: dict[str, str] | None = None
        self.runs_before = 0
        self.srun = 0
        self.words = ""

    def name(self, rank: int) -> str:
        return self.names[rank] if rank < len(self.names) else f"node {rank}"

    @property
    def everybody(self) -> range:
        return range(int(self.settings["nodes"]))

    @property
    def succeeded(self) -> bool:
        return all(rank in self.reports and self.reports[rank]["code"] == 0 for rank in self.everybody)

    @property
    def restarts_left(self) -> int:
        return max(0, int(self.settings["max_restarts"]) - self.attempt)


class Conclusion:
    def __init__(self, do: str, status: Document) -> None:
        self.do = do
        self.status = status


def conclude(known: Evidence) -> Conclusion:
    if known.cancel:
        return Conclusion("finish", _status(known, "cancelled", "user", "cancelled", _code(known) or _TOLD))
    if known.succeeded:
        return Conclusion("finish", _status(known, "succeeded", "none", "", 0))
    if known.slurm is not None and started_again(known.slurm, known.runs_before):
        return _left(known)
    if known.told or _told_on_a_node(known):
        return _told(known)
    asked = any(report.get("preempted") for report in known.reports.values())
    if asked:
        return _again(known, "preempted", "its ranks were warned and have left a checkpoint", REQUEUE)
    status = _failed(known)
    if status["reason"] == "node_failure":
        return _again(known, "node_failure", status["message"], status["exit_code"], status["failure"])
    return Conclusion("finish", status)


def too_often(settings: Document, attempt: int, last: Document | None) -> Document:
    """Return the result of a job that Slurm has started once more than allowed.

    last: how the previous start ended; None if its first node never reported, as when it is lost.
    """
    known = Evidence(settings, attempt, [])
    why = last or {"reason": "node_failure", "message": "its first node was lost", "exit_code": None}
    message = "{}; {}".format(why["message"], _used_up(settings, attempt))
    return _status(known, "failed", why["reason"], message, why.get("exit_code"))


def not_started(settings: Document, attempt: int, reason: str, message: str) -> Document:
    return _status(Evidence(settings, attempt, []), "failed", reason, message, 1)


def cancelled(settings: Document, attempt: int) -> Document:
    known = Evidence(settings, attempt, [])
    return _status(known, "cancelled", "user", "cancelled before its ranks were started", None)


def started_again(facts: dict[str, str], runs_before: int) -> bool:
    """Return True if Slurm already restarts the job, after a lost or preempted node or by a user's request."""
    return int(facts.get("Restarts") or 0) > runs_before or facts["JobState"] == "PENDING"


def _left(known: Evidence) -> Conclusion:
    saved = any(report.get("preempted") for report in known.reports.values())
    if saved:
        message = "Slurm starts it again; its ranks have left a checkpoint"
        return Conclusion("leave", _status(known, "failed", "preempted", message, REQUEUE))
    message = "Slurm starts it again: it lost a node, or gave its nodes to another job"
    return Conclusion("leave", _status(known, "failed", "node_failure", message, _code(known) or _TOLD))


def _told(known: Evidence) -> Conclusion:
    """Decide after a SIGTERM from outside. Only Slurm knows its reason, from its record of the job."""
    facts = known.slurm
    saved = any(report.get("preempted") for report in known.reports.values())
    code = REQUEUE if saved else _code(known) or _TOLD
    words = "its ranks have left a checkpoint" if saved else _advice(known)
    if facts is None:
        said = "it was told to end, and Slurm could not be asked why"
        return Conclusion("leave", _status(known, "failed", "exit_code", said, code))
    if facts.get("PreemptTime", "None") != "None":
        return _again(known, "preempted", "a job of higher priority took its nodes; " + words, code)
    if facts.get("Reason") == "TimeLimit" or facts.get("JobState") == "TIMEOUT":
        limit = "its time limit ({}) was reached; ".format(facts.get("TimeLimit", "?"))
        if saved:
            return _again(known, "time_limit", limit + words, code)
        return Conclusion("finish", _status(known, "failed", "time_limit", limit + words, code))
    if facts.get("Reason") in _NODE_LOST or facts.get("JobState") == "NODE_FAIL":
        return _again(known, "node_failure", _lost_node(known, facts), code)
    if saved and facts.get("JobState") == "RUNNING":
        return _again(known, "preempted", words, code)
    if facts.get("JobState") in ("COMPLETING", "CANCELLED"):
        return _ended_in_slurm(known, facts, code)
    status = _failed(known)
    status["message"] = "its ranks were told to end by SIGTERM, and not by this program; " + status["message"]
    return Conclusion("finish", status)


def _ended_in_slurm(known: Evidence, facts: dict[str, str], code: int | None) -> Conclusion:
    """Decide for a job that Slurm has ended. Every ended job is COMPLETING, and only scancel has no reason.

    With another reason, Slurm's final state, which comes after this program, is more precise.
    """
    reason = facts.get("Reason", "None")
    if reason in ("None", "(null)"):
        return Conclusion("finish", _status(known, "cancelled", "user", "cancelled in Slurm (scancel)", code))
    return Conclusion("leave", _status(known, "failed", "exit_code", f"ended in Slurm ({reason})", code))


def _lost_node(known: Evidence, facts: dict[str, str]) -> str:
    silent = [known.name(rank) for rank in known.everybody if rank not in known.reports]
    names = f"; {', '.join(silent)} has not reported" if silent else ""
    return "Slurm lost a node of the job ({}){}".format(facts.get("Reason", "NODE_FAIL"), names)


def _told_on_a_node(known: Evidence) -> bool:
    return any(report.get("told") == "SIGTERM" for report in known.reports.values())


def _advice(known: Evidence) -> str:
    """Return advice for a script that ignored the warning."""
    lacks = "call accelerator.checkpoint_on_preemption() after each step to leave a checkpoint"
    if not int(known.settings["max_restarts"]):
        lacks += ", and give --max-restarts to be started again from it"
    return "no checkpoint was left: " + lacks


def _again(known: Evidence, reason: str, why: str, code: int | None, failure: Document | None = None) -> Conclusion:
    if known.restarts_left:
        return Conclusion("again", _status(known, "failed", reason, why, code, failure))
    message = f"{why}; {_used_up(known.settings, known.attempt + 1)}"
    return Conclusion("finish", _status(known, "failed", reason, message, code, failure))


def _used_up(settings: Document, starts: int) -> str:
    allowed = int(settings["max_restarts"])
    if not allowed:
        return "it is not started again without --max-restarts"
    return f"it was started {starts} times, and --max-restarts {allowed} allows no more"


def _failed(known: Evidence) -> Document:
    """Return the first failure, by its node's clock; else what is known about the missing nodes."""
    told = [report["failure"] for report in known.reports.values() if report.get("failure")]
    first = _first(told)
    overdue = known.overdue
    if overdue is not None and (first is None or first["rank"] is None or _ECHO.search(str(first["message"]))):
        return _status(known, "failed", overdue["reason"], overdue["message"], _code(known) or 1, first)
    if first is not None:
        return _status(known, "failed", first["reason"], _said(first), first["exit_code"], first)
    failed = {rank: report for rank, report in known.reports.items() if report["code"] != 0}
    if failed:
        rank, report = min(failed.items(), key=lambda item: (_late(item[1]), float(item[1]["at"]), item[0]))
        killed = "" if report["refused"] else _killed(report["code"])
        words = killed or report["words"] or "it ended with code {}".format(report["code"])
        message = f"{known.name(rank)}: {words}"
        return _status(known, "failed", report["refused"] or "exit_code", message, report["code"])
    return _without_reports(known)


def _first(failures: list[Document]) -> Document | None:
    """Return the earliest failure, of a rank rather than a launcher."""
    ranks = [failure for failure in failures if failure["rank"] is not None]
    return min(ranks or failures, key=lambda failure: float(failure["time"]) or float("inf"), default=None)


def _without_reports(known: Evidence) -> Document:
    missing = [rank for rank in known.everybody if rank not in known.reports]
    lost = [rank for rank in missing if rank in known.begun]
    names = ", ".join(known.name(rank) for rank in lost or missing)
    words = ": " + known.words if known.words else ""
    if any(f"No module named {name!r}" in words for name in ("submitit", "schedulers")):
        words += f"; there: {known.settings['python']} -m pip install 'accel-launch[slurm]'"
    code = known.srun or 1
    if lost:
        return _status(known, "failed", "node_failure", f"{names} ended without a word{words}", code)
    return _status(known, "failed", "setup", f"{names} could not begin{words}", code)


def _late(report: Document) -> bool:
    """Return True for a node that timed out in the rendezvous, which matters less than one that could not join."""
    return bool(report["refused"] == "rendezvous")


def _code(known: Evidence) -> int | None:
    codes = [report["code"] for report in known.reports.values() if report["code"]]
    told = [report["failure"]["exit_code"] for report in known.reports.values() if report.get("failure")]
    return next(iter(told + codes), None)


def _killed(code: int) -> str:
    """Return a message if a signal killed the launcher: the last line in its log is then a rank's."""
    return f"accel launch was killed by {signal.Signals(code - 128).name}" if code in (134, 137, 139) else ""


def _said(failure: Document) -> str:
    who = "rank {}".format(failure["rank"]) if failure["rank"] is not None else "the launcher on " + failure["host"]
    message = str(failure["message"]) or str(failure["how"])
    text = message if message.startswith(who) else f"{who}: {message}"
    return "{} ({})".format(text, failure["cause"]) if failure["cause"] else text


def _status(
    known: Evidence, state: str, reason: str, message: str, code: int | None, failure: Document | None = None
) -> Document:
    facts = known.slurm or {}
    return {
        "state": state,
        "reason": reason,
        "exit_code": code,
        "attempt": known.attempt,
        "message": message,
        "native_state": facts.get("JobState", ""),
        "failure": failure,
    }
