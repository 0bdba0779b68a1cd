"""A program that reports on the jobs of its host, with one session for all requests.

It reads one line of JSON:

    {"root": "~/.accel", "do": [{"op": "status", "job": "…"}, {"op": "logs", "job": "…", "from": {}, …}]}

It prints one line, `{"done": […]}` or `{"error": "…"}`, and after it the bytes of the logs, in their order.
Or it reads

    {"root": "~/.accel", "watch_s": 600}

and then ids of jobs, one per line. It prints each id, on a line, as soon as that job may have ended here, for
`watch_s` seconds or until the input ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time

from . import logs as files
from .listen import listen_on_first
from .program import InvalidRequest, answer, write_reply

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from typing import Any

    Step = dict[str, Any]

JOB = re.compile(r"[A-Za-z0-9_-]+\Z")
LOOK_S = 0.1
LOOK_FOR_LIFE_S = 1.0
STARTED_AT_ONCE = 8
login_umask = 0o022  # until `main` reads it


def main() -> None:
    global login_umask
    login_umask = os.umask(0o077)
    contents: list[bytes] = []

    def respond(root: str, request: dict[str, Any]) -> dict[str, Any] | None:
        if "watch_s" in request:
            watch(root, request["watch_s"])
            return None
        return {"done": [OPERATIONS[step["op"]](root, step, contents) for step in request["do"]]}

    line = answer(respond)
    if line is not None:
        write_reply(line, contents if "done" in line else ())


def directory_of(root: str, step: Step) -> str:
    job = str(step["job"])
    if not JOB.match(job):
        raise InvalidRequest(f"{job!r} is not a job id")
    return os.path.join(root, "jobs", job)


def watch(root: str, seconds: float) -> None:
    import threading

    watched: dict[str, str] = {}

    def receive_jobs() -> None:
        for line in sys.stdin.buffer:
            job = line.decode("ascii", "replace").strip()
            watched[job] = directory_of(root, {"job": job})
        os._exit(0)

    threading.Thread(target=receive_jobs, daemon=True).start()
    started_at = refreshed_at = time.monotonic()
    while time.monotonic() - started_at < seconds:
        check_alive = time.monotonic() - refreshed_at >= LOOK_FOR_LIFE_S
        refreshed_at = time.monotonic() if check_alive else refreshed_at
        for job, directory in list(watched.items()):
            ended = os.path.exists(os.path.join(directory, "exit.json"))
            if ended or (check_alive and not has_supervisor(directory)):
                del watched[job]
                os.write(1, job.encode() + b"\n")
        time.sleep(LOOK_S)


def find(root: str, step: Step, contents: list[bytes]) -> Any:
    """Return the job's settings without its supervisors' token, and whether it was ever started; None if unknown."""
    directory = directory_of(root, step)
    settings = document(os.path.join(directory, "settings.json"))
    if not isinstance(settings, dict):
        return None
    settings.pop("token", None)
    started = any(os.path.exists(os.path.join(directory, name)) for name in ("state.json", "exit.json"))
    return {"settings": settings, "started": started}


def status(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return the contents of the job's files here.

    The supervisor's lock is tested first: a supervisor that ends meanwhile has left its result by then.
    """
    directory = directory_of(root, step)
    is_alive = has_supervisor(directory)
    if not is_alive:
        tidy(directory)
    return {
        "known": os.path.isdir(directory),
        "alive": is_alive,
        "state": document(os.path.join(directory, "state.json")),
        "exit": document(os.path.join(directory, "exit.json")),
    }


def tidy(directory: str) -> None:
    """Start the cleanup after a killed supervisor; a later query may find the job's result."""
    if is_left(directory):
        import subprocess

        null = subprocess.DEVNULL
        subprocess.Popen(tidy_argv(directory), stdin=null, stdout=null, stderr=null, start_new_session=True)


def is_left(directory: str) -> bool:
    """Return True for a job that was started and has no result: without a supervisor, parts of it may still run."""
    state, result = (os.path.join(directory, name) for name in ("state.json", "exit.json"))
    return os.path.exists(state) and not os.path.exists(result)


def tidy_argv(directory: str) -> list[str]:
    """Return the command that ends what still runs of a job without a supervisor, killed or lost in a restart."""
    return [sys.executable, "-I", os.path.join(directory, "supervisor.pyz"), directory]


def document(path: str) -> Any:
    """Return the file's JSON value; None if there is no file, text if it is damaged."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text[:200]


def has_supervisor(directory: str) -> bool:
    """Return True while the job has a supervisor here. One that is just starting must find its lock free."""
    return os.path.exists(os.path.join(directory, "state.json")) and holds_lock(directory)


def holds_lock(directory: str) -> bool:
    """Return True while the job's supervisor lives, which holds its lock for that long, and no longer."""
    try:
        lock = os.open(os.path.join(directory, "supervisor.lock"), os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def logs(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """Return the data of the log files from the given offsets on, or else from their offsets at a time (`when`).

    It has at most `limit` bytes per file and `most` in all; with `only`, these files alone. `complete`: nothing
    writes to them any more.
    """
    directory, over, complete = _logs_of(root, step)
    start = {**positions_at(root, step, contents), **step["from"]} if "when" in step else step["from"]
    log_entries = []
    remaining = int(step["most"])
    for name, rank, attempt in files.log_files(directory):
        if name not in step.get("only", (name,)):
            continue
        file = files.opened(os.path.join(directory, name + ".log"))
        if file is None:
            continue
        offset = int(start.get(name, 0))
        with file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            data = file.read(min(int(step["limit"]), remaining)) if size > offset else b""
        remaining -= len(data)
        if size > offset:
            log_entries.append(
                {"name": name, "rank": rank, "attempt": attempt, "offset": offset, "length": len(data), "size": size}
            )
            contents.append(data)
    return {"files": log_entries, "complete": complete, "over": over}


def _logs_of(root: str, step: Step) -> tuple[str, bool, bool]:
    """Return the job's log directory, True if the job has ended, and True if nothing writes to the logs any more.

    The step's `over`, if there is one, replaces the test for a supervisor.
    """
    directory = directory_of(root, step)
    # Tested before reading: later text is read the next time.
    over = os.path.exists(os.path.join(directory, "exit.json"))
    complete = over or (bool(step["over"]) if "over" in step else not has_supervisor(directory))
    return os.path.join(directory, "logs"), over, complete


def positions_at(root: str, step: Step, contents: list[bytes]) -> dict[str, int]:
    """Return each log's offset at a time: the beginning of the line that was being written."""
    return files.positions_at(os.path.join(directory_of(root, step), "logs"), step["when"])


def tail(root: str, step: Step, contents: list[bytes]) -> list[dict[str, Any]]:
    """Return, for each log, how many of its last `count` lines are after the given offset, and where they begin.

    `counts` has another count for some.
    """
    directory, _, complete = _logs_of(root, step)
    tails = []
    for name, rank, attempt in files.log_files(directory):
        count, start = step["counts"].get(name, step["count"]), int(step["from"].get(name, 0))
        lines, offset = files.tail(os.path.join(directory, name + ".log"), start, count, complete)
        tails.append({"name": name, "rank": rank, "attempt": attempt, "lines": lines, "begin": offset})
    return tails


def start(root: str, step: Step, contents: list[bytes]) -> dict[str, str]:
    """Start supervisors, several at a time; return a problem for each job whose supervisor could not be started."""
    import subprocess

    own_umask = os.umask(login_umask)  # which the ranks inherit
    secrets = json.dumps(step["secrets"]).encode()
    problems = {}
    jobs = list(step["nodes"].items())
    while jobs:
        started = []
        for job, node in jobs[:STARTED_AT_ONCE]:
            directory = directory_of(root, {"job": job})
            argv = [sys.executable, "-I", os.path.join(directory, "supervisor.pyz"), directory, str(node)]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            started.append((job, subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=pipe)))
        for job, process in started:
            stderr = process.communicate(secrets)[1]
            if process.returncode != 0:
                problems[job] = stderr.decode("utf-8", "replace").strip() or f"status {process.returncode}"
        del jobs[:STARTED_AT_ONCE]
    os.umask(own_umask)
    return problems


def port(root: str, step: Step, contents: list[bytes]) -> int | None:
    """Return the first of the ports that is free here; None if none is."""
    server = listen_on_first(step["ports"])
    if server is None:
        return None
    with server:
        return int(server.getsockname()[1])


def claim(root: str, step: Step, contents: list[bytes]) -> bool:
    """Announce this node to other hosts that see the same directory. Nodes of one submit have the same token."""
    claims = directory_of(root, step) + ".claims"
    os.makedirs(claims, mode=0o700, exist_ok=True)
    name = f"{step['token']}.{int(step['node'])}"
    os.close(os.open(os.path.join(claims, name), os.O_WRONLY | os.O_CREAT, 0o600))
    return True


def clear(root: str, step: Step, contents: list[bytes]) -> list[int]:
    """Delete what is left of an earlier submit that started nothing.

    If other nodes of this submit have claimed the directory, return them and delete nothing.
    """
    import shutil

    directory = directory_of(root, step)
    claims = [name.partition(".") for name in files.entries(directory + ".claims")]
    other_nodes = [int(node) for token, _, node in claims if token == step["token"] and int(node) != int(step["node"])]
    if not other_nodes:
        shutil.rmtree(directory + ".claims", ignore_errors=True)
        if os.path.isdir(directory):
            shutil.rmtree(directory)
    return other_nodes


def cancel(root: str, step: Step, contents: list[bytes]) -> bool:
    """Request the supervisor to end the job. Return True if there is one, or was one."""
    directory = directory_of(root, step)
    if not os.path.isdir(directory):
        return False
    os.close(os.open(os.path.join(directory, "cancel"), os.O_WRONLY | os.O_CREAT, 0o600))
    if not has_supervisor(directory):
        tidy(directory)
    return os.path.exists(os.path.join(directory, "state.json"))


def identity(root: str, step: Step, contents: list[bytes]) -> str:
    """Return the random id of this root, written once; "" if there is no root yet and `make` is off.

    A machine's own id would be the same in clones, and is missing in containers.
    """
    if step["make"]:
        os.makedirs(root, mode=0o700, exist_ok=True)
    elif not os.path.isdir(root):
        return ""
    path = os.path.join(root, "host-id")
    if not os.path.exists(path):
        partial = f"{path}.{os.urandom(4).hex()}"
        with open(partial, "w") as file:
            file.write(os.urandom(8).hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # the first of several wins
            os.unlink(partial)
        except FileExistsError:
            os.unlink(partial)
        except OSError:  # a file system without hard links
            os.replace(partial, path)
    with open(path) as file:
        return file.read().strip()


OPERATIONS = {
    "status": status,
    "find": find,
    "logs": logs,
    "at": positions_at,
    "tail": tail,
    "port": port,
    "start": start,
    "claim": claim,
    "clear": clear,
    "cancel": cancel,
    "id": identity,
}
