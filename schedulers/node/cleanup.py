"""A program that deletes unneeded data on its host.

It reads one line of JSON:

    {"root": "~/.accel", "jobs": ["…"], "unused_s": 2592000}

It deletes the directories of these jobs, except of those with a live supervisor, and the blobs and
environments that no job here needs and that were not used for `unused_s` seconds. It prints one line,
`{"kept": {job: why}}` or `{"error": "…"}`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import time

from . import jobs
from .files import sweep
from .program import answer, write_reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DIGEST = re.compile(r"[0-9a-f]{64}\Z")
GRAVE = ".old-"
ENDING_S = 10.0


def main() -> None:
    os.umask(0o077)
    write_reply(answer(clean_up))


def clean_up(root: str, request: dict[str, Any]) -> dict[str, Any]:
    kept_jobs = {job: reason for job in request["jobs"] for reason in [clear_job(root, job)] if reason}
    for entry in entries(os.path.join(root, "jobs")):
        if entry.name.startswith(GRAVE):
            remove(entry.path)
    sweep(os.path.join(root, "blobs"), request["unused_s"])
    clear_environments(root, time.time() - request["unused_s"])
    return {"kept": kept_jobs}


def clear_job(root: str, job: str) -> str | None:
    """Delete the job's directory; return why, if it cannot be. A missing one is no error."""
    if not jobs.JOB.match(job):
        return "not a job id"
    directory = os.path.join(root, "jobs", job)
    if jobs.holds_lock(directory):
        return "its supervisor still runs"
    if jobs.is_left(directory):
        with contextlib.suppress(subprocess.TimeoutExpired):  # its result is deleted in any case
            argv = jobs.tidy_argv(directory)
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENDING_S)
    # Renamed first: a half removed directory must not look like a job.
    grave = os.path.join(root, "jobs", f"{GRAVE}{job}-{os.urandom(3).hex()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, grave)
    remove(grave)
    remove(directory + ".claims")
    return f"{grave} cannot be removed" if os.path.lexists(grave) else None


def remove(path: str) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path, onerror=try_with_rights)


def try_with_rights(function: Any, path: str, _: object) -> None:
    """Retry with full permissions: a job may have removed its own."""
    with contextlib.suppress(OSError):
        for directory in (os.path.dirname(path), path):
            if not os.path.islink(directory) and os.path.isdir(directory):
                os.chmod(directory, stat.S_IRWXU)
        if function in (os.unlink, os.rmdir):
            function(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except FileNotFoundError:
        return []


def clear_environments(root: str, cutoff: float) -> None:
    last_uses = used_environments(os.path.join(root, "jobs"))
    for entry in entries(os.path.join(root, "envs")):
        if not DIGEST.match(entry.name):
            continue
        last_used = max(used_at(entry.path), last_uses.get(entry.name, 0.0))
        if last_used < cutoff:
            clear_environment(entry.path, cutoff)


def used_at(directory: str) -> float:
    """Return when the environment was last used, or created if incomplete."""
    for path in (os.path.join(directory, ".whole"), directory):
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_mtime
    return 0.0


def used_environments(jobs: str) -> dict[str, float]:
    """Return the time until which jobs here used each environment; infinity for a job that has not ended."""
    last_uses: dict[str, float] = {}
    for entry in entries(jobs):
        try:
            with open(os.path.join(entry.path, "settings.json")) as file:
                python = json.load(file)["command"][0]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        digest = os.path.basename(os.path.dirname(os.path.dirname(python)))
        try:
            used_until = os.stat(os.path.join(entry.path, "exit.json")).st_mtime
        except FileNotFoundError:
            used_until = float("inf")
        last_uses[digest] = max(used_until, last_uses.get(digest, 0.0))
    return last_uses


def clear_environment(directory: str, cutoff: float) -> None:
    """Delete the environment under its lock, so that nobody creates or uses it meanwhile."""
    lock = os.open(directory + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if used_at(directory) < cutoff:
            remove(directory)
            for end in (".log", ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(directory + end)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
    finally:
        os.close(lock)
