"""Operations on this user's Slurm jobs, on a machine with Slurm's commands.

`accel` calls them in its own process on a login node; from elsewhere they are sent there (`main.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time

from ...node import jobs, logs, program
from ..batch import shared_files as documents
from . import slurm_commands as commands
from . import squeue_cache as slurm_queue

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Step = dict[str, Any]
    Row = dict[str, str]

COMMENT = "accel:"
REFUSALS = (program.InvalidRequest, commands.CommandFailed)
LOOK_S, NFS_REFRESH_S = 0.1, 1.0
MAX_MESSAGE = 300
LATE_S = 30.0  # after a job's grace, before a second cancel asks Slurm alone

NOT_STARTED = (
    "PENDING", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
)  # fmt: skip
LIVE = (*NOT_STARTED, "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
OVER = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
)  # fmt: skip


def status(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return what is known of each job, in order, with one squeue and at most one sacct for all.

    With `search` off, a job is not searched for in accounting; with `accounting` off, none is. In the result:

    searched:    accounting was searched for the job.
    age_s:       the age of squeue's output.
    unreachable: why the queue or accounting could not be queried. Jobs with neither `exit` nor `said` may exist.
    """
    queried = [(job, _from_files(root, job)) for job in step["jobs"]]
    answer: dict[str, Any] = {
        "jobs": [entry for _, entry in queried], "unreachable": None, "accounting": step.get("accounting", True),
        "age_s": 0.0,
    }  # fmt: skip
    unfinished = [(job, entry) for job, entry in queried if entry["exit"] is None]
    for job, entry in queried:
        if entry["exit"] is not None:
            delete_secrets(jobs.directory_of(root, job))  # in case the job was killed before it could
    if not unfinished:
        return answer
    polled_at = time.time()
    try:
        queue = _queue(root, [job for job, _ in unfinished], step)
        polled_at = queue.asked_at
        for job, entry in unfinished:
            _apply_queue_row(root, job, queue.rows.get(job["slurm"]), entry)
        unlisted = [(job, entry) for job, entry in unfinished if entry["said"] is None and job.get("search", True)]
        if unlisted and answer["accounting"]:
            _apply_accounting(root, unlisted, step)
    except commands.AccountingOff:
        answer["accounting"] = False
    except commands.Unanswered as error:
        answer["unreachable"] = str(error)
    for job, entry in unfinished:
        if entry["said"] is None or entry["said"]["state"].split()[0] not in LIVE:
            _recheck_result(root, job, entry, answered=answer["unreachable"] is None)
    answer["age_s"] = max(0.0, time.time() - polled_at)  # the time since squeue, sacct's included
    return answer


def _queue(root: str, queried: list[Step], step: Step) -> slurm_queue.CachedOutput:
    """Return squeue's output; for jobs that it lacks, output from after their submission."""
    answer = slurm_queue.read(root, step)
    unlisted = [job for job in queried if job["slurm"] not in answer.rows]
    newest = max((_submitted_at(root, job) for job in unlisted), default=0.0)
    if newest > answer.asked_at:
        answer = slurm_queue.read(root, step, since=min(newest, time.time()))
    return answer


def _submitted_at(root: str, job: Step) -> float:
    timestamp = _object(jobs.directory_of(root, job), "slurm/submitted.json").get("at")
    return timestamp if isinstance(timestamp, (int, float)) else 0.0


def _object(directory: str, name: str) -> dict[str, Any]:
    """Return the JSON object in a job's file; empty if the file is missing or damaged."""
    value = jobs.document(os.path.join(directory, name))
    return value if isinstance(value, dict) else {}


def _int_or_zero(value: Any) -> int:
    """Return the value if it is a positive int, else 0: files may be damaged."""
    return value if isinstance(value, int) and value > 0 else 0


def _recheck_result(root: str, job: Step, answer: dict[str, Any], *, answered: bool = False) -> None:
    """Check again for a result. A job that Slurm, when `answered`, does not know is over."""
    directory = jobs.directory_of(root, job)
    state = "" if answer["said"] is None else answer["said"]["state"].split()[0].rstrip("+")
    ended = state == "CANCELLED" or (state in OVER and not _may_start_again(directory, answer))
    if ended or (answered and not state):
        delete_secrets(directory)
    path = os.path.join(directory, "exit.json")
    answer["exit"] = jobs.document(path) if documents.exists(path) else None
    if not answer["started"]:
        answer["words"] = last_log_line(root, job)


def _may_start_again(directory: str, answer: dict[str, Any]) -> bool:
    """Return True if Slurm can restart a job that is over.

    `scontrol requeue` does, until the controller forgets the job, unless it was submitted with --no-requeue.
    """
    max_restarts = _object(directory, "slurm/settings.json").get("max_restarts")
    if answer["searched"] or not isinstance(max_restarts, int):
        return False
    return max_restarts > (answer["attempt"] if answer["started"] else 0)


def ends(root: str, watched: dict[str, Step], step: Step) -> Iterator[list[str]]:
    """Yield, at each look, the ids of those `watched` jobs that have left a result or that Slurm reports as over.

    Each look checks for results, which costs Slurm nothing, and calls squeue only if its output is too old.
    """
    answered_at = refreshed_at = 0.0
    use_squeue = True
    while True:
        refresh = time.monotonic() - refreshed_at >= NFS_REFRESH_S
        refreshed_at = time.monotonic() if refresh else refreshed_at
        exists = documents.exists if refresh else os.path.exists
        pending = list(watched.items())
        finished = [
            job for job, job_step in pending if exists(os.path.join(jobs.directory_of(root, job_step), "exit.json"))
        ]
        try:
            answer = slurm_queue.read(root, step) if use_squeue and pending and not finished else None
        except commands.Unanswered:
            answer = None
        except commands.CommandFailed:  # no Slurm here: a poll of the job reports it
            answer, use_squeue = None, False
        if answer is not None and answer.asked_at != answered_at:
            answered_at = answer.asked_at
            ended = {number: row for number, row in answer.rows.items() if row["state"] not in LIVE}
            finished = [
                job for job, job_step in pending
                if job_step["slurm"] in ended and commands.is_ours(ended[job_step["slurm"]], *marks(root, job_step))
            ]  # fmt: skip
        yield finished


def _from_files(root: str, job: Step) -> dict[str, Any]:
    directory = jobs.directory_of(root, job)
    result = jobs.document(os.path.join(directory, "exit.json"))
    answer: dict[str, Any] = {
        "exit": result, "said": None, "searched": False, "attempt": 0, "started": False, "foreign": False, "words": "",
    }  # fmt: skip
    if result is None:
        starts = logs.json_lines(os.path.join(directory, "slurm/attempts.jsonl"))
        launched_attempt = logs.newest_attempt(os.path.join(directory, "logs/launch.jsonl")) if starts else None
        answer["started"] = bool(starts)
        answer["attempt"] = max([launched_attempt or 0, *(_int_or_zero(start.get("attempt")) for start in starts[-1:])])
    return answer


def _apply_queue_row(root: str, job: Step, row: Row | None, answer: dict[str, Any]) -> None:
    if row is None:
        return
    if not commands.is_ours(row, *marks(root, job)):
        answer["foreign"] = True
        return
    answer["said"] = {
        "state": row["state"],
        "reason": "" if row["reason"] in ("None", "(null)") else row["reason"],
        "code": commands.wait_status(row["code"]),
        "derived": commands.wait_status(row["derived"]),
        "restarts": int(row["restarts"] or 0) if row["restarts"].isdigit() else 0,
    }


def _apply_accounting(root: str, unlisted: list[tuple[Step, dict[str, Any]]], step: Step) -> None:
    for _, answer in unlisted:
        answer["searched"] = True
    rows_by_id: dict[str, list[Row]] = {}
    for row in commands.accounts_of([job["slurm"] for job, _ in unlisted], step):
        rows_by_id.setdefault(row["id"], []).append(row)
    for job, answer in unlisted:
        own_rows = [row for row in rows_by_id.get(job["slurm"], ()) if commands.is_ours(row, *marks(root, job))]
        # Accounting lags: what it says of a job that the controller does not know counts when the job is over.
        if own_rows and own_rows[-1]["state"].split()[0] not in LIVE:
            keys = ("state", "code", "derived")
            answer["said"] = {**{key: own_rows[-1][key] for key in keys}, "reason": "", "restarts": len(own_rows) - 1}


def last_log_line(root: str, job: Step) -> str:
    """Return the last line that the batch script printed."""
    path = os.path.join(jobs.directory_of(root, job), "logs/slurm.log")
    if "_" in job["slurm"]:
        path = os.path.join(marks(root, job)[1], "slurm", job["slurm"].partition("_")[2] + ".log")
    line = logs.last_line(path, MAX_MESSAGE)
    return "".join(char if char.isprintable() else "?" for char in line)


def marks(root: str, job: Step) -> tuple[str, str]:
    """Return the job's comment and working directory; in an array, those of its first job."""
    directory = jobs.directory_of(root, job)
    first = job["job"]
    if "_" in job["slurm"]:
        first = str(_object(directory, "slurm/submitted.json").get("first", first))
    return COMMENT + first, jobs.directory_of(root, {"job": first})


def earlier(root: str, job: str, *, array: bool, clusters: str | None = None) -> str | None:
    """Return Slurm's number for the job or array from an earlier submit, or None if Slurm surely never had it.

    Raises commands.Unanswered when that is unknown now.
    """
    directory = os.path.join(jobs.directory_of(root, {"job": job}), "slurm")
    submission = jobs.document(os.path.join(directory, "submitted.json"))
    if isinstance(submission, dict):
        return str(submission.get("slurm")).partition("_")[0]
    try:
        started_at = os.stat(os.path.join(directory, "submitting")).st_mtime
    except FileNotFoundError:
        return None
    starts = [] if array else logs.json_lines(os.path.join(directory, "attempts.jsonl"))
    if starts and starts[-1].get("slurm_job"):
        return str(starts[-1]["slurm_job"])
    step = {"clusters": clusters}
    job_marks = (COMMENT + job, jobs.directory_of(root, {"job": job}))
    key = "array" if array else "id"
    own_ids = [row[key] for row in commands.queue(step) if commands.is_ours(row, *job_marks)]
    if own_ids:
        return own_ids[-1]
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started_at - 3600))
    try:
        rows = commands.accounts(["-S", since], step)
    except commands.AccountingOff:
        return None
    own_ids = [row["id"] for row in rows if commands.is_ours(row, *job_marks)]
    return own_ids[-1].partition("_")[0] if own_ids else None


def find(root: str, step: Step, contents: list[bytes]) -> Any:
    """Return the job's spec and Slurm number, or None. In an array, `first` is the first job's id, `at` its index."""
    directory = jobs.directory_of(root, step)
    spec = jobs.document(os.path.join(directory, "slurm/spec.json"))
    if not isinstance(spec, dict):
        return None
    submission = jobs.document(os.path.join(directory, "slurm/submitted.json"))
    if isinstance(submission, dict):
        return {"spec": spec, "slurm": str(submission.get("slurm"))}
    if "first" not in step:
        return {"spec": spec, "slurm": earlier(root, step["job"], array=False)}
    number = earlier(root, step["first"], array=True)
    return {"spec": spec, "slurm": None if number is None else "{}_{}".format(number, step["at"])}


def cancel(root: str, step: Step, contents: list[bytes]) -> str:
    """Request the job's graceful end. Return what was done: `over`, `gone`, `cancelled` or `asked`.

    A running job reads a file and needs no controller for it. Slurm would send a signal to srun too, which then
    kills the step instead of letting it end.
    """
    directory = jobs.directory_of(root, step)
    if os.path.exists(os.path.join(directory, "exit.json")):
        return "over"
    stale = _request_cancel(directory)
    answer = _from_files(root, step)
    try:
        rows = {row["id"]: row for row in commands.queue(step)}
        _apply_queue_row(root, step, rows.get(step["slurm"]), answer)
    except commands.Unanswered:
        if answer["started"] and not stale:
            return "asked"
        raise
    info = answer["said"]
    if info is None or info["state"] not in LIVE:
        return "gone"
    starts = len(logs.json_lines(os.path.join(directory, "slurm/attempts.jsonl")))
    pending = info["state"] in NOT_STARTED
    if info["state"] == "COMPLETING" or (not pending and starts > info["restarts"] and not stale):
        return "asked"
    try:
        commands.call(["scancel", *commands.cluster_flags(step), step["slurm"]])
    except commands.CommandFailed:
        rows = {row["id"]: row for row in commands.queue(step)}
        if step["slurm"] not in rows or rows[step["slurm"]]["state"] not in LIVE:  # it has ended meanwhile
            return "gone"
        raise
    slurm_queue.forget(root, step)
    if pending and not starts:
        # Slurm may keep no record of a job that never started, least of all of an array task.
        write_cancelled(directory, info["state"])
    return "cancelled"


def _request_cancel(directory: str) -> bool:
    """Write the cancel file. Return True if it was written so long ago that nobody seems to read it."""
    path = os.path.join(directory, "slurm/cancel")
    try:
        age = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        return False
    return age > float(_object(directory, "slurm/settings.json").get("grace_s", 0)) + LATE_S


def write_cancelled(directory: str, native: str) -> None:
    """Write that the job was cancelled before it began, unless it has a result."""
    result = {"schema": 1, "state": "cancelled", "reason": "user", "native_state": native, "observed_at": time.time()}
    path = os.path.join(directory, "exit.json")
    partial = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(result) + "\n")
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(partial)
    delete_secrets(directory)


def delete_secrets(directory: str) -> None:
    """Delete the secrets of a job that will never read them."""
    try:
        os.unlink(os.path.join(directory, "slurm/secrets.json"))
    except OSError:
        return


def running(root: str, step: Step, contents: list[bytes]) -> dict[str, str]:
    """Return the state of each of these jobs that Slurm still runs, or will, from one squeue."""
    rows = {row["id"]: row for row in commands.queue(step) if row["state"] in LIVE}
    states: dict[str, str] = {}
    for job in step["jobs"] if rows else ():
        candidates = [rows[job["slurm"]]] if job["slurm"] in rows else [] if job["slurm"] else rows.values()
        job_marks = marks(root, job) if job["slurm"] else (COMMENT + job["job"], jobs.directory_of(root, job))
        states.update((job["job"], row["state"]) for row in candidates if commands.is_ours(row, *job_marks))
    return states


def clear(root: str, step: Step, contents: list[bytes]) -> dict[str, str]:
    """Remove the directories of jobs that are over. Return those that stay, and why."""
    remaining: dict[str, str] = {}
    for job in step["jobs"]:
        directory = jobs.directory_of(root, job)
        try:
            if os.path.isdir(directory):
                shutil.rmtree(directory)
        except OSError as error:
            remaining[job["job"]] = f"{error.filename or directory}: {(error.strerror or str(error)).lower()}"
    return remaining


def directories(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return this machine's paths of the root and the home directory."""
    return {"root": os.path.abspath(root), "home": os.path.expanduser("~")}


def check(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return the cluster's version of Slurm, its partitions, its accounting, and whether our root is writable."""
    fields = commands.SEPARATOR.join(("%R", "%a", "%l", "%D", "%A", "%G"))
    facts: dict[str, Any] = {"version": commands.call(["sinfo", "--version"]).strip(), "accounting": True, "root": None}
    text = commands.call(["sinfo", *commands.cluster_flags(step), "--noheader", "-o", fields])
    facts["partitions"] = [line.split(commands.SEPARATOR) for line in text.splitlines() if commands.SEPARATOR in line]
    try:
        commands.accounts(["-j", "1"], step)
    except commands.AccountingOff:
        facts["accounting"] = False
    except (commands.Unanswered, commands.CommandFailed) as error:
        facts["accounting"] = str(error)
    probe = os.path.join(root, "jobs")
    while not os.path.isdir(probe):
        probe = os.path.dirname(probe)
    if not os.access(probe, os.W_OK):
        facts["root"] = f"{probe} cannot be written to"
    return facts


def cluster(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return what the cluster's controller says of itself. Raises commands.Unanswered."""
    return commands.cluster()


OPERATIONS = {
    "status": status,
    "find": find,
    "cancel": cancel,
    "running": running,
    "clear": clear,
    "logs": jobs.logs,
    "at": jobs.positions_at,
    "tail": jobs.tail,
    "about": directories,
    "cluster": cluster,
    "check": check,
}
