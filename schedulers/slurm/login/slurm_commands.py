"""Slurm's commands, each called once for all jobs, and their output as rows.

Sent to login nodes with `job_ops.py`.
"""

from __future__ import annotations

import os
import re
import subprocess

from ..batch.unanswered import is_unanswered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    Step = dict[str, Any]
    Row = dict[str, str]

SEPARATOR = "\x1f"
NO_LOGIN_NODE = "not a Slurm login node. Set `login: HOST` in the target to use one over SSH"
COMMAND_TIMEOUT_S = 30.0
_BATCH_SIZE = 5000  # jobs in one argument, which may be 128 KiB long
_SPAN = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")  # of an array's elements: 7, 4-9, 0-8:2

# Name here -> squeue's name and width; longer values are cut.
QUEUE = {
    "id": ("JobArrayID", 40),
    "array": ("ArrayJobID", 20),
    "state": ("State", 24),
    "code": ("exit_code", 12),
    "derived": ("DerivedEC", 12),
    "restarts": ("RestartCnt", 8),
    "reason": ("Reason", 200),
    "comment": ("Comment", 120),
    "workdir": ("WorkDir", 400),
}
ACCOUNT = {
    "id": "JobID",
    "state": "State",
    "code": "ExitCode",
    "derived": "DerivedExitCode",
    "comment": "Comment",
    "workdir": "WorkDir",
}
# Usual directories of Slurm that only login shells have in their PATH.
_PLACES = ("/opt/slurm/bin", "/usr/local/slurm/bin", "/cm/shared/apps/slurm/current/bin", "/usr/local/bin", "/usr/bin")
_OF_A_JOB = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")


class Unanswered(Exception):
    """Slurm, or a part of it, cannot be queried now. The message has one line."""


class AccountingOff(Exception):
    """The cluster keeps no accounting."""


class CommandFailed(Exception):
    """A command has failed for good. The message has one line."""


class CommandNotFound(CommandFailed):
    """The command does not exist here."""


def extend_path() -> None:
    """Add Slurm's usual directories to the PATH of this process, which no login shell has started."""
    directories = os.environ.get("PATH", os.defpath).split(os.pathsep)
    extra_directories = [
        directory for directory in _PLACES if directory not in directories and os.path.isdir(directory)
    ]
    os.environ["PATH"] = os.pathsep.join([*directories, *extra_directories])


def queue(step: Step) -> list[Row]:
    """Return all of this user's jobs in squeue, including those that have just ended. Raises Unanswered."""
    return queue_rows(queue_text(step))


def queue_text(step: Step) -> str:
    fields = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in QUEUE.values())
    text = _query(["squeue", *cluster_flags(step), "--me", "--states=all", "--noheader", "--array", "-O", fields])
    return re.sub(f" +{SEPARATOR}", SEPARATOR, text)  # a tenth of the length, without the columns' padding


def queue_rows(text: str) -> list[Row]:
    """Return the rows of the output of `queue_text`."""
    return [row for row in map(_queue_row, text.split("\n")) if row is not None]


def _queue_row(line: str) -> Row | None:
    values = [value.strip() for value in line.split(SEPARATOR)]
    return {name: values[index] for index, name in enumerate(QUEUE)} if len(values) >= len(QUEUE) else None


def is_ours(row: Row, comment: str, workdir: str) -> bool:
    """Return True if the job has this comment, or this working directory where sites change comments."""
    return row["comment"] == comment or row["workdir"] in (workdir, workdir[: QUEUE["workdir"][1]])


def accounts_of(numbers: list[str], step: Step) -> list[Row]:
    """Return all runs of these jobs in accounting. Raises what `accounts` raises.

    An array is queried as a whole, and thousands of jobs in several calls: command lines are limited.
    """
    base_numbers = list(dict.fromkeys(number.partition("_")[0] for number in numbers))
    rows: list[Row] = []
    for start in range(0, len(base_numbers), _BATCH_SIZE):
        rows += accounts(["-j", ",".join(base_numbers[start : start + _BATCH_SIZE])], step)
    return rows + list(_of_elements(rows, numbers))


def _of_elements(rows: list[Row], numbers: list[str]) -> Iterator[Row]:
    """Yield rows for array elements without their own: unstarted ones share `74_[48-499]`, or `74` if none began."""
    row_ids = {row["id"] for row in rows}
    missing: dict[str, list[str]] = {}
    for number in numbers:
        array, separator, _ = number.partition("_")
        if separator and number not in row_ids:
            missing.setdefault(array, []).append(number)
    for row in rows:
        array, _, elements = row["id"].partition("_")
        spans = _SPAN.findall(elements.partition("%")[0]) if elements.startswith("[") else []
        if not spans and row["id"] != array:
            continue
        for number in missing.get(array, ()):
            index = int(number.partition("_")[2])
            if not spans or any(index in range(int(a), int(b or a) + 1, int(step or 1)) for a, b, step in spans):
                yield {**row, "id": number}


def accounts(selection: list[str], step: Step) -> list[Row]:
    """Return all runs of the selected jobs in accounting. Raises Unanswered, AccountingOff."""
    fields = ",".join(ACCOUNT.values())
    flags = ["--allocations", "--duplicates", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", "-o", fields]
    rows = []
    for line in _query(["sacct", *cluster_flags(step), *flags, *selection]).split("\n"):
        values = line.split(SEPARATOR)
        if len(values) == len(ACCOUNT) and values[1]:
            row = {name: values[index] for index, name in enumerate(ACCOUNT)}
            rows.append({**row, "code": _unfolded(row["code"]), "derived": _unfolded(row["derived"])})
    return rows


def _unfolded(code: str) -> str:
    """Undo sacct's subtraction of 128 where it is certain: from 143 (SIGTERM), as no program exits with 15."""
    return "143:0" if code == "15:0" else code


def cluster_flags(step: Mapping[str, Any]) -> list[str]:
    """Return the option for the selected cluster, if there are several."""
    return ["-M", str(step["clusters"])] if step.get("clusters") else []


def cluster() -> dict[str, Any]:
    """Return the name and MaxArraySize (None if unknown) of the controller that the commands use. Raises Unanswered."""
    config = dict(re.findall(r"^(ClusterName|MaxArraySize)\s*=\s*(\S+)", _query(["scontrol", "show", "config"]), re.M))
    if "ClusterName" not in config:
        raise Unanswered("scontrol show config: it shows no ClusterName")
    size = config.get("MaxArraySize", "")
    return {"name": config["ClusterName"], "max_array_size": int(size) if size.isdigit() else None}


def _query(argv: list[str]) -> str:
    """Call a command that cannot be refused: every failure is temporary and raises Unanswered."""
    try:
        return call(argv)
    except CommandNotFound:
        raise
    except CommandFailed as error:
        raise Unanswered(str(error)) from None


def call(argv: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Return the output of a Slurm command. Raises Unanswered, AccountingOff, and CommandFailed for a refusal."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("SLURM_CONF") or not name.startswith(_OF_A_JOB)
    }
    env["SLURM_BITSTR_LEN"] = "0"  # sacct names all elements of an array, however many
    try:
        completed = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=timeout_s)
    except FileNotFoundError:
        raise CommandNotFound(f"{argv[0]} not found: {NO_LOGIN_NODE}") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{argv[0]} did not respond within {timeout_s:g} s") from None
    except OSError as error:
        raise Unanswered(f"{argv[0]} cannot be run: {(error.strerror or str(error)).lower()}") from None
    if completed.returncode == 0:
        return completed.stdout.decode("utf-8", "surrogateescape")
    message = complaint(completed.stderr.decode("utf-8", "replace"))
    if "accounting storage is disabled" in message.lower():
        raise AccountingOff
    if is_unanswered(message):
        raise Unanswered(f"{argv[0]}: {message}")
    raise CommandFailed(f"{argv[0]}: {message}")


def complaint(stderr: str) -> str:
    """Return a command's error output as one line, without the command's name before each part."""
    parts = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in stderr.splitlines() if line.strip()]
    text = "; ".join(dict.fromkeys(parts)) or "no output"
    text = "".join(char if char.isprintable() else "?" for char in text)
    if "configuration source" in text:
        text = "Slurm has no configuration here (set SLURM_CONF, or `login: HOST` in the target): " + text
    return text if len(text) <= 400 else text[:400] + "…"


def wait_status(raw: str) -> str:
    """Return `exit:signal` for a status of wait(2)."""
    return f"{int(raw) >> 8}:{int(raw) & 127}" if raw.isdigit() else raw
