"""Starts a job's supervisor on this host, detached from whoever asks for it.

settings.json  its instructions; cancel  asks for the end; state.json  what it is doing; exit.json  how the job ended,
written once, when nothing of the job runs here; logs/  what the ranks, the launcher and the setup commands print.

Values for the environment that nobody else may read come on standard input, as JSON, and are kept in memory only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import sys
import time
import traceback

from . import wire
from .documents import SCHEMA, Document, make_room, say
from .watching import Supervisor
from .work import Ending, adopt_orphans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Settings = dict[str, Any]


RESULT_ROOM = 1 << 16
WRITE_TRIES = 60
LOCK_TRIES, LOCK_S = 20, 0.05
MOST_FILES = 1 << 16


class Problem(Exception):
    """Why there can be no supervisor; one line for people."""


def read_settings(directory: str, node: int) -> Settings:
    try:
        with open(os.path.join(directory, "settings.json")) as file:
            settings: Settings = json.load(file)
    except (OSError, ValueError) as error:
        raise Problem(f"{directory}/settings.json cannot be read: {error}") from None
    if settings.get("schema") != SCHEMA:
        raise Problem(f"settings.json is of schema {settings.get('schema')!r}, and this supervisor knows {SCHEMA}")
    if settings["node"] != node:
        raise Problem(
            f"{directory} holds what is meant for another host (number {settings['node']}, not {node}): "
            "the directory is shared between hosts; name one that is not (root)"
        )
    return settings


def check_secrets(settings: Settings, said: bytes) -> dict[str, str]:
    """The secrets' values: all that the settings name. A client that was cut off while it sent them starts nothing."""
    names = settings.get("secrets", [])
    try:
        secrets: dict[str, str] = json.loads(said or b"{}")
    except ValueError:
        secrets = {}
    absent = [name for name in names if name not in secrets]
    if absent:
        raise Problem(f"the values of secrets did not come: {', '.join(absent)}")
    return {name: secrets[name] for name in names}


def clean_up(settings: Settings, directory: str, message: str, result: Document) -> None:
    """After a supervisor that was killed, or a restart of the host: nothing of its job stays, and it is said so."""
    adopt_orphans()
    ending = Ending(settings["job_id"])
    while not ending.done(float(settings["grace_s"])):
        time.sleep(0.05)
    status = {"state": "failed", "reason": "node_failure", "exit_code": None, "attempt": 0, "message": message,
              "native_state": "", "failure": None, "fenced": True, "observed_at": time.time(), "schema": SCHEMA,
              "node": settings["node"]}  # fmt: skip
    for _ in range(WRITE_TRIES):
        try:
            return result.write_once(status)
        except OSError as error:
            say(f"{result.path}: {error.strerror}")
            if not os.path.isdir(directory):
                return None
            time.sleep(1)
    return None


def main(directory: str, node: int) -> NoReturn:
    """Leaves a supervisor behind that has left this session, and ends: with 0 once it stands."""
    os.umask(0o077)
    directory = os.path.abspath(os.path.expanduser(directory))
    said = sys.stdin.buffer.read()
    reading, telling = os.pipe()
    if os.fork():
        os.close(telling)
        told = b"".join(iter(lambda: os.read(reading, 4096), b""))
        if told != b"ok":
            print(told.decode(errors="replace") or "the supervisor died as it started", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0 if told == b"ok" else 1)
    os.close(reading)
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        become_supervisor(directory, node, telling, said)
    except Problem as problem:
        os.write(telling, str(problem).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(telling, traceback.format_exc().strip().splitlines()[-1].encode())
        say(traceback.format_exc())
    os._exit(1)


def become_supervisor(directory: str, node: int, telling: int, said: bytes) -> NoReturn:
    settings = read_settings(directory, node)
    os.makedirs(os.path.join(directory, "logs"), exist_ok=True)
    lock = os.open(os.path.join(directory, "supervisor.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not taken(lock):
        finished(telling)  # it has its supervisor
    if os.path.exists(os.path.join(directory, "exit.json")):
        finished(telling)
    before = os.path.exists(os.path.join(directory, "state.json"))
    host = (settings["nodes"] + settings["spares"])[node]
    server = None
    secrets = {}
    if not before:
        secrets = check_secrets(settings, said)
        try:
            server = wire.listen(host["control_port"])
        except OSError as error:
            raise Problem(f"port {host['control_port']} of {host['name']} cannot be had: {error.strerror}") from None
    leave_session(directory)
    result = Document(os.path.join(directory, "exit.json"), RESULT_ROOM)
    if server is None:
        os.write(telling, b"ok")
        os.close(telling)
        message = f"the supervisor on {host['name']} was killed, or the host restarted, while the job was there"
        clean_up(settings, directory, message, result)
        os._exit(0)
    adopt_orphans()
    allow_many_files()
    supervisor = Supervisor(settings, directory, secrets, server, result)
    supervisor.note(time.monotonic())
    os.write(telling, b"ok")
    os.close(telling)
    try:
        supervisor.run()
    except Exception as error:  # a defect of ours, or its directory was removed: nothing may go on unwatched
        say(traceback.format_exc())
        message = f"the supervisor on {host['name']} failed: {error!r} (see supervisor.log there)"
        clean_up(settings, directory, message, result)
    os._exit(0)


def taken(lock: int) -> bool:
    """Who only looks whether there is a supervisor holds the lock for a moment; a supervisor holds it for its life."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(LOCK_S)
        else:
            return True
    return False


def finished(telling: int) -> NoReturn:
    os.write(telling, b"ok")
    os._exit(0)


def leave_session(directory: str) -> None:
    os.chdir("/")
    path = os.path.join(directory, "supervisor.log")
    make_room(path)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


def allow_many_files() -> None:
    """A connection for each host: a thousand hosts are more than the usual limit. What runs here has its own back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
