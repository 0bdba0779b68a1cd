"""The outcome of a start of a Slurm job, computed without side effects once its ranks have ended.

`Observations` holds what the first node has collected; `decide_outcome` returns what follows:

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
_SIGTERM_CODE = 143
# Slurm's reasons for ending a running job whose node it has lost.
# https://slurm.schedmd.com/job_reason_codes.html
_NODE_LOST = ("NodeDown", "SystemFailure")
# A rank's error after another has ended. If a node has stopped reporting, that node is the cause.
_ECHO = re.compile(r"connection (closed|reset) by peer|broken pipe|socket|nccl|timed? ?out|node 0", re.IGNORECASE)


class Observations:
    """The facts about a start.

    settings:      the job's.
    attempt:       the newest that has run, including restarts within this start.
    names:         the nodes' names, by rank.
    reports:       each node's final report, by rank.
    started_ranks: the ranks of the nodes that have started.
    overdue:       why this program has ended the ranks' step, if it has.
    terminated:    this program has received SIGTERM.
    cancel:        the job was cancelled through accel.
    slurm:         the record of `scontrol show job`; None if that failed.
    runs_before:   earlier runs, by Slurm's count.
    srun:          its exit code.
    last_message:  the last line of a node without a report, or a line of srun.
    """

    def __init__(self, settings: Document, attempt: int, names: list[str]) -> None:
        self.settings = settings
        self.attempt = attempt
        self.names = names
        self.reports: dict[int, Document] = {}
        self.started_ranks: set[int] = set()
        self.overdue: Document | None = None
        self.terminated = False
        self.cancel = False
        self.slurm: dict[str, str] | None = None
        self.runs_before = 0
        self.srun = 0
        self.last_message = ""

    def name(self, rank: int) -> str:
        return self.names[rank] if rank < len(self.names) else f"node {rank}"

    @property
    def node_ranks(self) -> range:
        return range(int(self.settings["nodes"]))

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of the nodes without a report."""
        return [rank for rank in self.node_ranks if rank not in self.reports]

    @property
    def succeeded(self) -> bool:
        return all(rank in self.reports and self.reports[rank]["code"] == 0 for rank in self.node_ranks)

    @property
    def checkpointed(self) -> bool:
        return any(report.get("preempted") for report in self.reports.values())

    def code(self, default: int) -> int:
        """Return the exit code of a failure, else of a node, else the default."""
        failures = [report["failure"] for report in self.reports.values() if report.get("failure")]
        codes = [failure["exit_code"] for failure in failures]
        codes += [report["code"] for report in self.reports.values() if report["code"]]
        return codes[0] or default if codes else default

    def status(
        self, state: str, reason: str, message: str, code: int | None, failure: Document | None = None
    ) -> Document:
        return {
            "state": state,
            "reason": reason,
            "exit_code": code,
            "attempt": self.attempt,
            "message": message,
            "native_state": (self.slurm or {}).get("JobState", ""),
            "failure": failure,
        }


class Outcome:
    def __init__(self, do: str, status: Document) -> None:
        self.do = do
        self.status = status


def decide_outcome(observations: Observations) -> Outcome:
    code = observations.code(_SIGTERM_CODE)
    if observations.cancel:
        return Outcome("finish", observations.status("cancelled", "user", "cancelled", code))
    if observations.succeeded:
        return Outcome("finish", observations.status("succeeded", "none", "", 0))
    if observations.slurm is not None and is_requeued(observations.slurm, observations.runs_before):
        if observations.checkpointed:
            message = "Slurm starts it again; its ranks have left a checkpoint"
            return Outcome("leave", observations.status("failed", "preempted", message, REQUEUE))
        message = "Slurm starts it again: it lost a node, or gave its nodes to another job"
        return Outcome("leave", observations.status("failed", "node_failure", message, code))
    if observations.terminated or any(report.get("told") == "SIGTERM" for report in observations.reports.values()):
        return _outcome_when_terminated(observations)
    if observations.checkpointed:
        return _outcome_restart(observations, "preempted", "its ranks were warned and have left a checkpoint", REQUEUE)
    status = _failed(observations)
    if status["reason"] == "node_failure":
        return _outcome_restart(observations, "node_failure", status["message"], status["exit_code"], status["failure"])
    return Outcome("finish", status)


def restart_limit_status(settings: Document, attempt: int, last: Document | None) -> Document:
    """Return the result of a job that Slurm has started once more than allowed.

    last: how the previous start ended; None if its first node never reported, as when it is lost.
    """
    end = last or {"reason": "node_failure", "message": "its first node was lost", "exit_code": None}
    message = "{}; {}".format(end["message"], _used_up(settings, attempt))
    return Observations(settings, attempt, []).status("failed", end["reason"], message, end.get("exit_code"))


def is_requeued(facts: dict[str, str], runs_before: int) -> bool:
    """Return True if Slurm already restarts the job, after a lost or preempted node or by a user's request."""
    return int(facts.get("Restarts") or 0) > runs_before or facts["JobState"] == "PENDING"


def _outcome_when_terminated(observations: Observations) -> Outcome:
    """Decide after a SIGTERM from outside. Only Slurm knows its reason, from its record of the job."""
    facts, checkpointed = observations.slurm, observations.checkpointed
    code = REQUEUE if checkpointed else observations.code(_SIGTERM_CODE)
    detail = "its ranks have left a checkpoint" if checkpointed else _advice(observations)
    if facts is None:
        message = "it received SIGTERM, and Slurm could not be queried for the reason"
        return Outcome("leave", observations.status("failed", "exit_code", message, code))
    state, reason = facts.get("JobState"), facts.get("Reason", "None")
    if facts.get("PreemptTime", "None") != "None":
        return _outcome_restart(observations, "preempted", "a job of higher priority took its nodes; " + detail, code)
    if reason == "TimeLimit" or state == "TIMEOUT":
        limit = "its time limit ({}) was reached; ".format(facts.get("TimeLimit", "?"))
        if checkpointed:
            return _outcome_restart(observations, "time_limit", limit + detail, code)
        return Outcome("finish", observations.status("failed", "time_limit", limit + detail, code))
    if reason in _NODE_LOST or state == "NODE_FAIL":
        missing = ", ".join(map(observations.name, observations.missing_ranks))
        message = "Slurm lost a node of the job ({})".format(facts.get("Reason", "NODE_FAIL"))
        message += f"; no report from {missing}" if missing else ""
        return _outcome_restart(observations, "node_failure", message, code)
    if checkpointed and state == "RUNNING":
        return _outcome_restart(observations, "preempted", detail, code)
    if state in ("COMPLETING", "CANCELLED"):
        # Every ended job is COMPLETING, and only scancel has no reason. With another one, Slurm's final state, which
        # comes after this program, is more precise.
        if reason in ("None", "(null)"):
            return Outcome("finish", observations.status("cancelled", "user", "cancelled in Slurm (scancel)", code))
        return Outcome("leave", observations.status("failed", "exit_code", f"ended in Slurm ({reason})", code))
    status = _failed(observations)
    status["message"] = "its ranks received SIGTERM from outside accel; " + status["message"]
    return Outcome("finish", status)


def _advice(observations: Observations) -> str:
    """Return advice for a script that ignored the warning."""
    advice = "call accelerator.checkpoint_on_preemption() after each step to leave a checkpoint"
    if not int(observations.settings["max_restarts"]):
        advice += ", and set --max-restarts to restart from it"
    return "no checkpoint was left: " + advice


def _outcome_restart(
    observations: Observations, reason: str, cause: str, code: int | None, failure: Document | None = None
) -> Outcome:
    if int(observations.settings["max_restarts"]) > observations.attempt:
        return Outcome("again", observations.status("failed", reason, cause, code, failure))
    message = f"{cause}; {_used_up(observations.settings, observations.attempt + 1)}"
    return Outcome("finish", observations.status("failed", reason, message, code, failure))


def _used_up(settings: Document, starts: int) -> str:
    allowed = int(settings["max_restarts"])
    if not allowed:
        return "it is not started again without --max-restarts"
    return f"it was started {starts} times, and --max-restarts {allowed} allows no more"


def _failed(observations: Observations) -> Document:
    """Return the first failure by its node's clock, of a rank if there is one.

    Without a failure, return what is known about the missing nodes.
    """
    failures = [report["failure"] for report in observations.reports.values() if report.get("failure")]
    ranks = [failure for failure in failures if failure["rank"] is not None]
    first = min(ranks or failures, key=lambda failure: float(failure["time"]) or float("inf"), default=None)
    overdue = None if any(map(_refused, observations.reports.values())) else observations.overdue
    if overdue is not None and (first is None or first["rank"] is None or _ECHO.search(str(first["message"]))):
        return observations.status("failed", overdue["reason"], overdue["message"], observations.code(1), first)
    if first is not None:
        return observations.status("failed", first["reason"], _failure_text(first), first["exit_code"], first)
    failed = {rank: report for rank, report in observations.reports.items() if report["code"] != 0}
    if failed:
        rank, report = min(failed.items(), key=lambda item: (_gave_up_waiting(item[1]), float(item[1]["at"]), item[0]))
        killed = "" if report["refused"] else _killed(report["code"])
        detail = killed or report["words"] or "it ended with code {}".format(report["code"])
        message = f"{observations.name(rank)}: {detail}"
        return observations.status("failed", report["refused"] or "exit_code", message, report["code"])
    return _without_reports(observations)


def _without_reports(observations: Observations) -> Document:
    missing = observations.missing_ranks
    lost = [rank for rank in missing if rank in observations.started_ranks]
    names = ", ".join(observations.name(rank) for rank in lost or missing)
    detail = ": " + observations.last_message if observations.last_message else ""
    if any(f"No module named {name!r}" in detail for name in ("submitit", "schedulers")):
        detail += f"; there: {observations.settings['python']} -m pip install 'accel-launch[slurm]'"
    code = observations.srun or 1
    if lost:
        return observations.status("failed", "node_failure", f"{names} ended without a report{detail}", code)
    return observations.status("failed", "setup", f"{names} could not start{detail}", code)


def _refused(report: Document) -> bool:
    """Return True for a node that could not start its part. The others may wait for it in vain."""
    return bool(report["code"] and report["refused"]) and not _gave_up_waiting(report)


def _gave_up_waiting(report: Document) -> bool:
    """Return True for a node that timed out in the rendezvous, which matters less than one that could not join."""
    return bool(report["refused"] == "rendezvous")


def _killed(code: int) -> str:
    """Return a message if a signal killed the launcher: the last line in its log is then a rank's."""
    return f"accel launch was killed by {signal.Signals(code - 128).name}" if code in (134, 137, 139) else ""


def _failure_text(failure: Document) -> str:
    subject = "rank {}".format(failure["rank"]) if failure["rank"] is not None else "the launcher on " + failure["host"]
    message = str(failure["message"]) or str(failure["how"])
    text = message if message.startswith(subject) else f"{subject}: {message}"
    return "{} ({})".format(text, failure["cause"]) if failure["cause"] else text
