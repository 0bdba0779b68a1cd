"""Tells of the jobs on the host it runs on, all that is asked for in one conversation. One line of JSON comes in:

    {"root": "~/.accel", "do": [{"op": "status", "job": "…"}, {"op": "logs", "job": "…", "from": {}, "limit": 1000000}]}

One line comes out, `{"done": […]}` or `{"error": "…"}`, and after it the bytes of the logs, in their order.

    {"root": "~/.accel", "watch_s": 600}

is followed by ids of jobs, a line each; each comes out again, a line each, as soon as that job may have ended here.
That goes on for so many seconds, or until the input ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import sys
import time

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from typing import Any

    Step = dict[str, Any]

LOG = re.compile(r"(?:rank-(?P<rank>\d+)\.a(?P<attempt>\d+)|node-\d+|setup|slurm)\.log\Z")
ATTEMPT = re.compile(r"a(\d+)\Z")
JOB = re.compile(r"[A-Za-z0-9_-]+\Z")
AT_ONCE = 64 << 20
BLOCK = 4096
LOOK_S = 0.1
LOOK_FOR_LIFE_S = 1.0


class Refused(Exception):
    """One line for people."""


def main() -> None:
    os.umask(0o077)
    contents: list[bytes] = []
    try:
        request = json.loads(sys.stdin.buffer.readline())
        root = os.path.expanduser(request["root"])
        if "watch_s" in request:
            watch(root, request["watch_s"])
            return
        line: dict[str, Any] = {"done": [OPERATIONS[step["op"]](root, step, contents) for step in request["do"]]}
    except Refused as error:
        line = {"error": str(error)}
    except OSError as error:
        line = {"error": in_words(error)}
    give(line, contents)


def in_words(error: OSError) -> str:
    return "{}: {}".format(error.filename or "a file", (error.strerror or str(error)).lower())


def give(line: dict[str, Any], contents: list[bytes]) -> None:
    """The answer; after one that says what was done, the bytes that belong to it."""
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    if "done" in line:
        for data in contents:
            sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def directory_of(root: str, step: Step) -> str:
    job = str(step["job"])
    if not JOB.match(job):
        raise Refused(f"{job!r} is no job id")
    return os.path.join(root, "jobs", job)


def watch(root: str, seconds: float) -> None:
    import threading

    wanted: dict[str, str] = {}

    def hear() -> None:
        for line in sys.stdin.buffer:
            job = line.decode("ascii", "replace").strip()
            wanted[job] = directory_of(root, {"job": job})
        os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    began = looked = time.monotonic()
    while time.monotonic() - began < seconds:
        for_life = time.monotonic() - looked >= LOOK_FOR_LIFE_S
        looked = time.monotonic() if for_life else looked
        for job, directory in list(wanted.items()):
            ended = os.path.exists(os.path.join(directory, "exit.json"))
            if ended or (for_life and not alive(directory)):
                del wanted[job]
                os.write(1, job.encode() + b"\n")
        time.sleep(LOOK_S)


def find(root: str, step: Step, contents: list[bytes]) -> Any:
    """The job's settings without what only its supervisors may know, and whether it was ever started; None when there
    is no such job here."""
    directory = directory_of(root, step)
    settings = document(os.path.join(directory, "settings.json"))
    if not isinstance(settings, dict):
        return None
    settings.pop("token", None)
    started = any(os.path.exists(os.path.join(directory, name)) for name in ("state.json", "exit.json"))
    return {"settings": settings, "started": started}


def status(root: str, step: Step, contents: list[bytes]) -> dict[str, Any]:
    """What the job's files here say. Whether its supervisor lives is asked first: one that has ended meanwhile has
    left its result by then."""
    directory = directory_of(root, step)
    living = alive(directory)
    if not living:
        tidy(directory)
    return {
        "known": os.path.isdir(directory),
        "alive": living,
        "state": document(os.path.join(directory, "state.json")),
        "exit": document(os.path.join(directory, "exit.json")),
    }


def tidy(directory: str) -> None:
    """Has what is left of a job ended whose supervisor was killed; the next who asks may find how it ended."""
    state, result, program = (os.path.join(directory, name) for name in ("state.json", "exit.json", "supervisor.pyz"))
    if os.path.exists(state) and not os.path.exists(result):
        import subprocess

        null = subprocess.DEVNULL
        argv = [sys.executable, "-I", program, directory]
        subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True)


def document(path: str) -> Any:
    """What the file holds; None when there is none, text when it is damaged."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text[:200]


def alive(directory: str) -> bool:
    """Whether the job has a supervisor here: it holds its lock for as long as it lives, and no longer."""
    if not os.path.exists(os.path.join(directory, "state.json")):
        return False  # one that is just starting must find its lock free
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
    """What the log files hold from the given offsets on, where there are none from those that they had at a time
    (`when`). `complete`: nobody writes to them any more."""
    directory = directory_of(root, step)
    # Asked before reading: what is written after this is read the next time.
    over = os.path.exists(os.path.join(directory, "exit.json"))
    complete = over or not alive(directory)
    start = {**at(root, step, contents), **step["from"]} if "when" in step else step["from"]
    files = []
    left = AT_ONCE
    for name, rank, attempt in log_files(os.path.join(directory, "logs")):
        offset = int(start.get(name, 0))
        with open(os.path.join(directory, "logs", name + ".log"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset)
            data = file.read(min(int(step["limit"]), left)) if size > offset else b""
        left -= len(data)
        if size > offset:
            files.append(
                {"name": name, "rank": rank, "attempt": attempt, "offset": offset, "length": len(data), "size": size}
            )
            contents.append(data)
    return {"files": files, "complete": complete, "over": over}


def log_files(directory: str) -> list[tuple[str, int | None, int]]:
    """Name without `.log`, rank (None: the launcher's) and attempt. Later attempts have a directory each, `aN`."""
    found = []
    for path in ["", *sorted(entries(directory))]:
        match = ATTEMPT.match(path) if path else None
        if path and not match:
            continue
        first = int(match.group(1)) if match else 0
        for name in sorted(entries(os.path.join(directory, path))):
            log = LOG.match(name)
            if log:
                rank = int(log.group("rank")) if log.group("rank") else None
                found.append((os.path.join(path, name[: -len(".log")]), rank, first + int(log.group("attempt") or 0)))
    return found


def entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def at(root: str, step: Step, contents: list[bytes]) -> dict[str, int]:
    """Where each log stood at a time, at the beginning of the line that was being written."""
    directory = os.path.join(directory_of(root, step), "logs")
    found = {}
    for path in ["", *(name for name in sorted(entries(directory)) if ATTEMPT.match(name))]:
        for name, size in sizes_at(os.path.join(directory, path, "sizes.jsonl"), step["when"]).items():
            whole = os.path.join(path, name)
            if LOG.match(os.path.basename(name) + ".log"):
                found[whole] = line_start(os.path.join(directory, whole + ".log"), int(size))
    return found


def sizes_at(path: str, when: float) -> dict[str, int]:
    before: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return before
    for line in lines:
        try:
            noted = json.loads(line)
        except ValueError:  # cut short by a crash
            continue
        if noted["time"] > when:
            break
        before = noted["sizes"]
    return before


def line_start(path: str, offset: int) -> int:
    try:
        file = open(path, "rb")  # noqa: SIM115  # closed below
    except FileNotFoundError:
        return 0
    with file:
        while offset > 0:
            start = max(0, offset - BLOCK)
            file.seek(start)
            block = file.read(offset - start)
            found = max(block.rfind(b"\n"), block.rfind(b"\r"))
            if found >= 0:
                return start + found + 1
            offset = start
    return 0


def port(root: str, step: Step, contents: list[bytes]) -> int | None:
    """The first of the ports that is free here; None when none is."""
    for number in step["ports"]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", number))
                server.listen(1)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            return int(server.getsockname()[1])
    return None


def claim(root: str, step: Step, contents: list[bytes]) -> bool:
    """Says to other hosts that see the same directory which node of the job this is; those of one submit have the same
    token."""
    claims = directory_of(root, step) + ".claims"
    os.makedirs(claims, mode=0o700, exist_ok=True)
    name = f"{step['token']}.{int(step['node'])}"
    os.close(os.open(os.path.join(claims, name), os.O_WRONLY | os.O_CREAT, 0o600))
    return True


def clear(root: str, step: Step, contents: list[bytes]) -> list[int]:
    """Removes what an earlier submit left, which started nothing. Where other nodes of this one have laid their claim
    to the directory, they are named and nothing is removed."""
    import shutil

    directory = directory_of(root, step)
    claims = [name.partition(".") for name in entries(directory + ".claims")]
    others = [int(node) for token, _, node in claims if token == step["token"] and int(node) != int(step["node"])]
    if not others:
        shutil.rmtree(directory + ".claims", ignore_errors=True)
        if os.path.isdir(directory):
            shutil.rmtree(directory)
    return others


def cancel(root: str, step: Step, contents: list[bytes]) -> bool:
    """Asks the supervisor here to end the job. Says whether there is such a job."""
    directory = directory_of(root, step)
    if not os.path.isdir(directory):
        return False
    os.close(os.open(os.path.join(directory, "cancel"), os.O_WRONLY | os.O_CREAT, 0o600))
    if not alive(directory):
        tidy(directory)
    return True


OPERATIONS = {
    "status": status,
    "find": find,
    "logs": logs,
    "at": at,
    "port": port,
    "claim": claim,
    "clear": clear,
    "cancel": cancel,
}

if __name__ == "__main__":
    main()
