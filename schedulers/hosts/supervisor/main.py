"""Start of a job's supervisor on this host, detached from the caller.

settings.json  its instructions; cancel  requests the end; state.json  its progress; exit.json  the job's result,
written once, when nothing of the job runs here; logs/  output of the ranks, the launcher and the setup commands.

A guard, the supervisor's parent, ends what is left if the supervisor is killed. If both were killed, or the host has
restarted, the next query starts this program with the directory alone, to do the same.

Secrets come on standard input, as JSON, and are kept in memory only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback

from ...node.listen import listen
from ...node.process_table import adopt_orphans
from .documents import SCHEMA, AtomicJsonFile, job_status, log, preallocate
from .member import Supervisor
from .reaper import ProcessReaper
from .slots import lock_soon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Settings = dict[str, Any]


RESULT_RESERVED_BYTES = 1 << 16
WRITE_TRIES = 60
MAX_OPEN_FILES = 1 << 16
KILLED = "the supervisor on {} was killed, or the host restarted, while the job was there"


class CannotStart(Exception):
    """The reason why the supervisor cannot start; one line for people."""


def read_settings(directory: str, node: int | None = None) -> Settings:
    try:
        with open(os.path.join(directory, "settings.json")) as file:
            settings: Settings = json.load(file)
    except (OSError, ValueError) as error:
        raise CannotStart(f"{directory}/settings.json cannot be read: {error}") from None
    if settings.get("schema") != SCHEMA:
        raise CannotStart(f"settings.json is of schema {settings.get('schema')!r}, and this supervisor knows {SCHEMA}")
    if node not in (None, settings["node"]):
        raise CannotStart(
            f"{directory} has the settings of another host (number {settings['node']}, not {node}): "
            "hosts share the directory; set root to one that they do not share"
        )
    return settings


def check_secrets(settings: Settings, secrets_json: bytes) -> dict[str, str]:
    """Return the secrets' values. Raises CannotStart if one is missing: the client was cut off while it sent them."""
    names = settings.get("secrets", [])
    try:
        secrets: dict[str, str] = json.loads(secrets_json or b"{}")
    except ValueError:
        secrets = {}
    absent = [name for name in names if name not in secrets]
    if absent:
        raise CannotStart(f"the values of secrets are missing: {', '.join(absent)}")
    return {name: secrets[name] for name in names}


def clean_up(settings: Settings, result: AtomicJsonFile, message: str, grace_s: float) -> None:
    """End everything of the job on this host, then write the result."""
    adopt_orphans()
    reaper = ProcessReaper(settings["job_id"])
    while not reaper.done(grace_s):
        time.sleep(0.05)
    status = job_status("failed", "node_failure", message, fenced=True)
    status.update({"observed_at": time.time(), "schema": SCHEMA, "node": settings["node"]})
    for _ in range(WRITE_TRIES):
        try:
            return result.write_once(status)
        except OSError as error:
            log(f"{result.path}: {error.strerror}")
            if not os.path.isdir(os.path.dirname(result.path)):
                return None
            time.sleep(1)
    return None


def main(directory: str, node: str | None = None) -> NoReturn:
    """Leave a supervisor behind in a session of its own, and exit with 0 once it is ready.

    Without a node, clean up after a supervisor that was killed.
    """
    os.umask(0o077)
    directory = os.path.abspath(os.path.expanduser(directory))
    if node is None:
        with contextlib.suppress(CannotStart):
            settings = read_settings(directory)
            if exists(directory, "state.json") and try_lock(directory) and not exists(directory, "exit.json"):
                end_remaining(settings, directory)
        os._exit(0)
    secrets_json = sys.stdin.buffer.read()
    ready_fd, notify_fd = os.pipe()
    if os.fork():
        os.close(notify_fd)
        reply = b"".join(iter(lambda: os.read(ready_fd, 4096), b""))
        if reply != b"ok":
            print(reply.decode(errors="replace") or "the supervisor died as it started", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0 if reply == b"ok" else 1)
    os.close(ready_fd)
    try:
        os.setsid()
        become_supervisor(directory, int(node), notify_fd, secrets_json)
    except CannotStart as problem:
        os.write(notify_fd, str(problem).encode())
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(notify_fd, traceback.format_exc().strip().splitlines()[-1].encode())
        log(traceback.format_exc())
    os._exit(1)


def become_supervisor(directory: str, node: int, notify_fd: int, secrets_json: bytes) -> NoReturn:
    """Fork the supervisor and become its guard, unless the job has one or has ended here."""
    settings = read_settings(directory, node)
    os.makedirs(os.path.join(directory, "logs"), exist_ok=True)
    if not try_lock(directory) or exists(directory, "exit.json"):  # it has a supervisor, or has ended
        signal_ready(notify_fd)
        os._exit(0)
    if exists(directory, "state.json"):
        leave_session(directory)
        signal_ready(notify_fd)
        end_remaining(settings, directory)
        os._exit(0)
    secrets = check_secrets(settings, secrets_json)
    host = host_of_this_node(settings)
    try:
        server = listen(host["control_port"]) if len(settings["nodes"] + settings["spares"]) > 1 else None
    except OSError as error:
        raise CannotStart(f"cannot listen on port {host['control_port']} of {host['name']}: {error.strerror}") from None
    leave_session(directory)
    result = AtomicJsonFile(os.path.join(directory, "exit.json"), RESULT_RESERVED_BYTES)
    child = os.fork()
    if child:
        if server is not None:
            server.close()
        os.close(notify_fd)
        run_guard(child, settings, directory, result)
    adopt_orphans()
    allow_many_files()
    supervisor = Supervisor(settings, directory, secrets, server, result)
    supervisor.note(time.monotonic())
    signal_ready(notify_fd)
    try:
        supervisor.run()
    except Exception as error:  # our defect, or a removed directory: nothing may run unsupervised
        log(traceback.format_exc())
        message = f"the supervisor on {host['name']} failed: {error!r} (see supervisor.log there)"
        clean_up(settings, result, message, max_grace_s(settings))
    os._exit(0)


def run_guard(supervisor: int, settings: Settings, directory: str, result: AtomicJsonFile) -> NoReturn:
    adopt_orphans()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    _, status = os.waitpid(supervisor, 0)
    if status != 0 and exists(directory, "state.json"):
        clean_up(settings, result, KILLED.format(host_of_this_node(settings)["name"]), max_grace_s(settings))
    os._exit(0)


def end_remaining(settings: Settings, directory: str) -> None:
    result = AtomicJsonFile(os.path.join(directory, "exit.json"), RESULT_RESERVED_BYTES)
    clean_up(settings, result, KILLED.format(host_of_this_node(settings)["name"]), grace_s=0.0)


def host_of_this_node(settings: Settings) -> dict[str, Any]:
    host: dict[str, Any] = (settings["nodes"] + settings["spares"])[settings["node"]]
    return host


def max_grace_s(settings: Settings) -> float:
    """Return the grace period; with other hosts, at most the heartbeat limit: then they may continue the job."""
    grace_s = float(settings["grace_s"])
    return grace_s if len(settings["nodes"] + settings["spares"]) == 1 else min(grace_s, float(settings["heartbeat_s"]))


def exists(directory: str, name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))


def try_lock(directory: str) -> bool:
    """Lock the supervisor's lock until this process ends; return True if that worked. Readers hold it for a moment."""
    try:
        return lock_soon(os.path.join(directory, "supervisor.lock")) is not None
    except OSError:
        return False


def signal_ready(notify_fd: int) -> None:
    os.write(notify_fd, b"ok")
    os.close(notify_fd)


def leave_session(directory: str) -> None:
    os.chdir("/")
    path = os.path.join(directory, "supervisor.log")
    preallocate(path)
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    os.close(log_fd)
    os.close(null)


def allow_many_files() -> None:
    """Raise the limit of open files, for a connection to each of many hosts. The job's processes get the old one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
