"""Operations on this user's Slurm jobs, on a machine with Slurm's commands.

`accel` calls them in its own process on a login node; from elsewhere they are sent there (`main.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time

try:
    from ...node import jobs, logs
    from ..batch import shared_files as documents
    from . import slurm_commands as commands
    from . import squeue_cache as slurm_queue
except ImportError:  # sent to a host, beside this
    import jobs  # type: ignore[import-not-found, no-redef]
    import logs  # type: ignore[import-not-found, no-redef]
    import shared_files as documents  # type: ignore[import-not-found, no-redef]
    import slurm_commands as commands  # type: ignore[import-not-found, no-redef]
    import squeue_cache as slurm_queue  # type: ignore[import-not-found, no-redef]

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Step = dict[str, Any]
    Row = dict[str, str]

COMMENT = "accel:"
REFUSALS = (jobs.Refused, commands.Refused)
LOOK_S, AFRESH_S = 0.1, 1.0
LONGEST_WORDS = 300
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
    asked = step["jobs"]
    answers = [_of_files(root, job) for job in asked]
    answer: dict[str, Any] = {
        "jobs": answers, "unreachable": None, "accounting": step.get("accounting", True), "age_s": 0.0
    }  # fmt: skip
    waiting = [at for at, found in enumerate(answers) if found["exit"] is None]
    for at in set(range(len(asked))).difference(waiting):
        forget_secrets(jobs.directory_of(root, asked[at]))  # where the job was killed before it could
    if not waiting:
        return answer
    asked_at = time.time()
    try:
        queue = _queue(root, [asked[at] for at in waiting], step)
        asked_at = queue.asked_at
        for at in waiting:
            _take_queue(root, asked[at], queue.rows.get(asked[at]["slurm"]), answers[at])
        left = [at for at in waiting if answers[at]["said"] is None and asked[at].get("search", True)]
        if left and answer["accounting"]:
            for at in left:
                answers[at]["searched"] = True
            _take_accounts(root, [(asked[at], answers[at]) for at in left], step)
    except commands.AccountingOff:
        answer["accounting"] = False
    except commands.Unanswered as error:
        answer["unreachable"] = str(error)
    for at in waiting:
        if answers[at]["said"] is None or answers[at]["said"]["state"].split()[0] not in LIVE:
            _look_again(root, asked[at], answers[at], answered=answer["unreachable"] is None)
    answer["age_s"] = max(0.0, time.time() - asked_at)  # what came after it, sacct too, has made it older
    return answer


def _queue(root: str, waiting: list[Step], step: Step) -> slurm_queue.Answer:
    """Return squeue's output; for jobs that it lacks, output from after their submission."""
    answer = slurm_queue.read(root, step)
    unnamed = [job for job in waiting if job["slurm"] not in answer.rows]
    newest = max((_submitted_at(root, job) for job in unnamed), default=0.0)
    if newest > answer.asked_at:
        answer = slurm_queue.read(root, step, since=min(newest, time.time()))
    return answer


def _submitted_at(root: str, job: Step) -> float:
    noted = jobs.document(os.path.join(jobs.directory_of(root, job), "slurm/submitted.json"))
    at = noted.get("at") if isinstance(noted, dict) else None
    return at if isinstance(at, (int, float)) else 0.0


def _whole(value: Any) -> int:
    """Return the value if it is a positive int, else 0: files may be damaged."""
    return value if isinstance(value, int) and value > 0 else 0


def _look_again(root: str, job: Step, answer: dict[str, Any], *, answered: bool = False) -> None:
    """Check again for a result. A job that Slurm, when `answered`, does not know is over."""
    directory = jobs.directory_of(root, job)
    state = "" if answer["said"] is None else answer["said"]["state"].split()[0].rstrip("+")
    ended = state == "CANCELLED" or (state in OVER and not _may_start_again(directory, answer))
    if ended or (answered and not state):
        forget_secrets(directory)
    path = os.path.join(directory, "exit.json")
    answer["exit"] = jobs.document(path) if documents.exists(path) else None
    if not answer["started"]:
        answer["words"] = last_words(root, job)


def _may_start_again(directory: str, answer: dict[str, Any]) -> bool:
    """Return True if Slurm can restart a job that is over.

    `scontrol requeue` does, until the controller forgets the job, unless it was submitted with --no-requeue.
    """
    settings = jobs.document(os.path.join(directory, "slurm/settings.json"))
    most = settings.get("max_restarts") if isinstance(settings, dict) else None
    if answer["searched"] or not isinstance(most, int):
        return False
    return most > (answer["attempt"] if answer["started"] else 0)


def ends(root: str, wanted: dict[str, Step], step: Step) -> Iterator[list[str]]:
    """Yield, at each look, the ids of those `wanted` jobs that have left a result or that Slurm reports as over.

    Each look checks for results, which costs Slurm nothing, and calls squeue only if its output is too old.
    """
    heard = looked = 0.0
    asks = True
    while True:
        afresh = time.monotonic() - looked >= AFRESH_S
        looked = time.monotonic() if afresh else looked
        exists = documents.exists if afresh else os.path.exists
        found = list(wanted.items())
        over = [job for job, each in found if exists(os.path.join(jobs.directory_of(root, each), "exit.json"))]
        try:
            answer = slurm_queue.read(root, step) if asks and found and not over else None
        except commands.Unanswered:
            answer = None
        except commands.Refused:  # there is no Slurm here: whoever asks for the job's status finds out
            answer, asks = None, False
        if answer is not None and answer.asked_at != heard:
            heard = answer.asked_at
            over = [job for job, each in found if _is_over(root, each, answer.rows.get(each["slurm"]))]
        yield over


def _is_over(root: str, job: Step, row: Row | None) -> bool:
    return row is not None and row["state"] not in LIVE and commands.is_ours(row, *marks(root, job))


def _of_files(root: str, job: Step) -> dict[str, Any]:
    directory = jobs.directory_of(root, job)
    found = jobs.document(os.path.join(directory, "exit.json"))
    answer: dict[str, Any] = {
        "exit": found, "said": None, "searched": False, "attempt": 0, "started": False, "foreign": False, "words": "",
    }  # fmt: skip
    if found is None:
        starts = documents.lines(os.path.join(directory, "slurm/attempts.jsonl"))
        inside = logs.newest_attempt(os.path.join(directory, "logs/launch.jsonl")) if starts else None
        answer["started"] = bool(starts)
        answer["attempt"] = max([inside or 0, *(_whole(start.get("attempt")) for start in starts[-1:])])
    return answer


def _take_queue(root: str, job: Step, row: Row | None, answer: dict[str, Any]) -> None:
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


def _take_accounts(root: str, waiting: list[tuple[Step, dict[str, Any]]], step: Step) -> None:
    found: dict[str, list[Row]] = {}
    for row in commands.accounts_of([job["slurm"] for job, _ in waiting], step):
        found.setdefault(row["id"], []).append(row)
    for job, answer in waiting:
        ours = [row for row in found.get(job["slurm"], ()) if commands.is_ours(row, *marks(root, job))]
        # Accounting lags: what it says of a job that the controller does not know counts when the job is over.
        if ours and ours[-1]["state"].split()[0] not in LIVE:
            keys = ("state", "code", "derived")
            answer["said"] = {**{key: ours[-1][key] for key in keys}, "reason": "", "restarts": len(ours) - 1}


def last_words(root: str, job: Step) -> str:
    """Return the last line that the batch script printed."""
    path = os.path.join(jobs.directory_of(root, job), "logs/slurm.log")
    if "_" in job["slurm"]:
        path = os.path.join(marks(root, job)[1], "slurm", job["slurm"].partition("_")[2] + ".log")
    words = logs.last_line(path, LONGEST_WORDS)
    return "".join(sign if sign.isprintable() else "?" for sign in words)


def marks(root: str, job: Step) -> tuple[str, str]:
    """Return the job's comment and working directory; in an array, those of its first job."""
    directory = jobs.directory_of(root, job)
    first = job["job"]
    if "_" in job["slurm"]:
        noted = jobs.document(os.path.join(directory, "slurm/submitted.json"))
        if isinstance(noted, dict):
            first = str(noted.get("first", first))
    return COMMENT + first, jobs.directory_of(root, {"job": first})


def earlier(root: str, job: str, *, array: bool, clusters: str | None = None) -> str | None:
    """Return Slurm's number for the job or array from an earlier submit, or None if Slurm surely never had it.

    Raises commands.Unanswered when that is unknown now.
    """
    directory = os.path.join(jobs.directory_of(root, {"job": job}), "slurm")
    noted = jobs.document(os.path.join(directory, "submitted.json"))
    if isinstance(noted, dict):
        return str(noted.get("slurm")).partition("_")[0]
    try:
        began = os.stat(os.path.join(directory, "submitting")).st_mtime
    except FileNotFoundError:
        return None
    starts = [] if array else documents.lines(os.path.join(directory, "attempts.jsonl"))
    if starts and starts[-1].get("slurm_job"):
        return str(starts[-1]["slurm_job"])
    step = {"clusters": clusters}
    of_ours = (COMMENT + job, jobs.directory_of(root, {"job": job}))
    key = "array" if array else "id"
    mine = [row[key] for row in commands.queue(step) if commands.is_ours(row, *of_ours)]
    if mine:
        return mine[-1]
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began - 3600))
    try:
        rows = commands.accounts(["-S", since], step)
    except commands.AccountingOff:
        return None
    mine = [row["id"] for row in rows if commands.is_ours(row, *of_ours)]
    return mine[-1].partition("_")[0] if mine else None


def find(root: str, step: Step, contents: list[bytes]) -> Any:
    """Return the job's spec and Slurm number, or None. In an array, `first` is the first job's id, `at` its index."""
    directory = jobs.directory_of(root, step)
    spec = jobs.document(os.path.join(directory, "slurm/spec.json"))
    if not isinstance(spec, dict):
        return None
    noted = jobs.document(os.path.join(directory, "slurm/submitted.json"))
    if isinstance(noted, dict):
        return {"spec": spec, "slurm": str(noted.get("slurm"))}
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
    unheard = _leave_word(directory)
    answer = _of_files(root, step)
    try:
        rows = {row["id"]: row for row in commands.queue(step)}
        _take_queue(root, step, rows.get(step["slurm"]), answer)
    except commands.Unanswered:
        if answer["started"] and not unheard:
            return "asked"
        raise
    said = answer["said"]
    if said is None or said["state"] not in LIVE:
        return "gone"
    starts = len(documents.lines(os.path.join(directory, "slurm/attempts.jsonl")))
    waits = said["state"] in NOT_STARTED
    if said["state"] == "COMPLETING" or (not waits and starts > said["restarts"] and not unheard):
        return "asked"
    try:
        commands.call(["scancel", *commands.where(step), step["slurm"]])
    except commands.Refused:
        rows = {row["id"]: row for row in commands.queue(step)}
        if step["slurm"] not in rows or rows[step["slurm"]]["state"] not in LIVE:  # it has ended meanwhile
            return "gone"
        raise
    slurm_queue.forget(root, step)
    if waits and not starts:
        # Slurm may keep nothing of a job that never began, of a task of an array least of all.
        leave_result(directory, said["state"])
    return "cancelled"


def _leave_word(directory: str) -> bool:
    """Write the cancel file. Return True if it was written so long ago that nobody seems to read it."""
    path = os.path.join(directory, "slurm/cancel")
    try:
        age = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        return False
    settings = jobs.document(os.path.join(directory, "slurm/settings.json"))
    grace = float(settings.get("grace_s", 0)) if isinstance(settings, dict) else 0.0
    return age > grace + LATE_S


def leave_result(directory: str, native: str) -> None:
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
    forget_secrets(directory)


def forget_secrets(directory: str) -> None:
    """Delete the secrets of a job that will never read them."""
    try:
        os.unlink(os.path.join(directory, "slurm/secrets.json"))
    except OSError:
        return


def clear(root: str, step: Step, contents: list[bytes]) -> dict[str, str]:
    """Remove the directories of finished jobs. Return those that stay, and why."""
    kept: dict[str, str] = {}
    rows: list[Row] | None = None
    for job in step["jobs"]:
        directory = jobs.directory_of(root, job)
        if not os.path.isdir(directory):
            continue
        if not os.path.exists(os.path.join(directory, "exit.json")):
            rows = commands.queue(step) if rows is None else rows
            of_ours = marks(root, job) if job["slurm"] else (COMMENT + job["job"], directory)
            mine = [row for row in rows if commands.is_ours(row, *of_ours) and row["id"] == (job["slurm"] or row["id"])]
            if any(row["state"] in LIVE for row in mine):
                kept[job["job"]] = f"it is {mine[-1]['state'].lower()} at Slurm"
                continue
        try:
            shutil.rmtree(directory)
        except OSError as error:
            kept[job["job"]] = f"{error.filename or directory}: {(error.strerror or str(error)).lower()}"
    return kept


def about(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return this machine's paths of the root and the home directory."""
    return {"root": os.path.abspath(root), "home": os.path.expanduser("~")}


def check(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return the cluster's version of Slurm, its partitions, its accounting, and whether our root is writable."""
    fields = commands.SEPARATOR.join(("%R", "%a", "%l", "%D", "%A", "%G"))
    found: dict[str, Any] = {"version": commands.call(["sinfo", "--version"]).strip(), "accounting": True, "root": None}
    text = commands.call(["sinfo", *commands.where(step), "--noheader", "-o", fields])
    found["partitions"] = [line.split(commands.SEPARATOR) for line in text.splitlines() if commands.SEPARATOR in line]
    try:
        commands.accounts(["-j", "1"], step)
    except commands.AccountingOff:
        found["accounting"] = False
    except (commands.Unanswered, commands.Refused) as error:
        found["accounting"] = str(error)
    probe = os.path.join(root, "jobs")
    while not os.path.isdir(probe):
        probe = os.path.dirname(probe)
    if not os.access(probe, os.W_OK):
        found["root"] = f"{probe} cannot be written to"
    return found


OPERATIONS = {
    "status": status,
    "find": find,
    "cancel": cancel,
    "clear": clear,
    "logs": jobs.logs,
    "at": jobs.at,
    "tail": jobs.tail,
    "about": about,
    "check": check,
}
