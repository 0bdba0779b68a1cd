"""Starts a job's supervisor on this host, detached from whoever asks for it.

settings.json  its instructions; secrets.json  values for the environment, removed once read; cancel  asks for the end;
state.json     what it is doing; exit.json  how the job ended, written once, when nothing of the job runs here;
logs/          what the ranks, the launcher and the setup commands print.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
import traceback

from . import wire
from .documents import SCHEMA, write_once
from .watching import Supervisor
from .work import Ending, adopt_orphans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Settings = dict[str, Any]


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


def take_secrets(directory: str) -> dict[str, str]:
    """The secrets' values, which from now on are nowhere on the disk."""
    path = os.path.join(directory, "secrets.json")
    try:
        with open(path) as file:
            secrets: dict[str, str] = json.load(file)
        os.unlink(path)
    except FileNotFoundError:
        return {}
    return secrets


def clean_up(settings: Settings, directory: str, message: str) -> None:
    """After a supervisor that was killed, or a restart of the host: nothing of its job stays, and it is said so."""
    adopt_orphans()
    ending = Ending(settings["job_id"])
    while not ending.done(float(settings["grace_s"])):
        time.sleep(0.05)
    status = {"state": "failed", "reason": "node_failure", "exit_code": None, "attempt": 0, "message": message,
              "native_state": "", "failure": None, "fenced": True, "observed_at": time.time(), "schema": SCHEMA,
              "node": settings["node"]}  # fmt: skip
    write_once(os.path.join(directory, "exit.json"), status)


def main(directory: str, node: int) -> NoReturn:
    """Leaves a supervisor behind that has left this session, and ends: with 0 once it stands."""
    os.umask(0o077)
    directory = os.path.abspath(os.path.expanduser(directory))
    reading, telling = os.pipe()
    if os.fork():
        os.close(telling)
        said = b"".join(iter(lambda: os.read(reading, 4096), b""))
        if said != b"ok":
            print(said.decode(errors="replace") or "the supervisor died as it started", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0 if said == b"ok" else 1)
    os.close(reading)
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        become_supervisor(directory, node, telling)
    except Problem as problem:
        os.write(telling, str(problem).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(telling, traceback.format_exc().strip().splitlines()[-1].encode())
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def become_supervisor(directory: str, node: int, telling: int) -> NoReturn:
    settings = read_settings(directory, node)
    os.makedirs(os.path.join(directory, "logs"), exist_ok=True)
    lock = os.open(os.path.join(directory, "supervisor.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        finished(telling)  # it has its supervisor
    if os.path.exists(os.path.join(directory, "exit.json")):
        finished(telling)
    before = os.path.exists(os.path.join(directory, "state.json"))
    host = (settings["nodes"] + settings["spares"])[node]
    server = None
    if not before:
        try:
            server = wire.listen(host["control_port"])
        except OSError as error:
            raise Problem(f"port {host['control_port']} of {host['name']} cannot be had: {error.strerror}") from None
    leave_session(directory)
    secrets = take_secrets(directory)
    if server is None:
        os.write(telling, b"ok")
        os.close(telling)
        message = f"the supervisor on {host['name']} was killed, or the host restarted, while the job was there"
        clean_up(settings, directory, message)
        os._exit(0)
    adopt_orphans()
    supervisor = Supervisor(settings, directory, secrets, server)
    supervisor.note(time.monotonic())
    os.write(telling, b"ok")
    os.close(telling)
    try:
        supervisor.run()
    except Exception as error:  # a defect of ours, or its directory was removed: nothing may go on unwatched
        traceback.print_exc()
        sys.stderr.flush()
        clean_up(settings, directory, f"the supervisor on {host['name']} failed: {error!r} (see supervisor.log there)")
    sys.stderr.flush()
    os._exit(0)


def finished(telling: int) -> NoReturn:
    os.write(telling, b"ok")
    os._exit(0)


def leave_session(directory: str) -> None:
    os.chdir("/")
    log = os.open(os.path.join(directory, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
