"""The processes of a job on this host: setup commands, then `accel launch`, and their end."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import threading
import time

from ...node import logs
from ...node.process_table import JOB_MARK, as_exit_code, die_with_parent
from ...node.redaction import redact
from . import wire
from .documents import log, preallocate
from .reaper import ProcessReaper
from .slots import NotEnoughSlots, Slots, required_slots, visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
    from urllib.request import OpenerDirector

ALLOWANCE_S = 6.0  # for `accel launch` to end its ranks after their grace
LEFTOVER_GRACE_S = 1.0
NOTE_S = 1.0
# For the job's processes: as they were when this program began.
FILES_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
UMASK = os.umask(0o077)
os.umask(UMASK)
_MAX_MESSAGE = 500
_COPY = "ACCEL_COPY_OF_"
_QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}
_WAIT_S, _ALLOWANCE_S, _RETRY_S = 60, 30.0, 5.0
_SESSION_VARIABLES = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "SSH_ORIGINAL_COMMAND")


class NodeRunner:
    """This host's part of a job. Orders choose the next step, `tick` takes it; the leader is sent `state`."""

    def __init__(self, settings: dict[str, Any], directory: str, secrets: dict[str, str]) -> None:
        self._settings = settings
        self._directory = directory
        self._logs = os.path.join(directory, "logs")
        self._secrets = secrets
        self._index = int(settings["node"])
        self._process: subprocess.Popen[bytes] | None = None
        self._remaining_setup: list[list[str]] | None = None
        self._reaper = ProcessReaper(settings["job_id"])
        self._kill_at = self._grace_ends_at = math.inf  # set by `stop`
        self._clock = logs.Clock(self._logs)
        server = settings.get("metadata_server")
        self._announcements = Announcements(server) if server else None
        self._events_from = 0
        self._noted_at = 0.0
        self.rank = -1
        root = os.path.dirname(os.path.dirname(directory))
        host = (settings["nodes"] + settings["spares"])[self._index]["name"]
        self._slots = Slots(root, settings["job_id"], host)
        self._visible: dict[str, str] = {}
        self._is_next_in_queue = False
        self._next_look_at = 0.0
        self.state: dict[str, Any] = {
            "phase": "waiting", "attempt": 0, "port": 0, "code": None, "report": None, "message": "", "warning": "",
            "cancel": False, "queue": self._slots.id, "holds": False, "waits": "",
        }  # fmt: skip

    def apply_order(self, order: dict[str, Any]) -> None:
        """Start what an order requires; the same order may come any number of times."""
        stage, phase, attempt = order["do"], self.state["phase"], int(order["attempt"])
        is_member = self._index in order["members"]
        self._is_next_in_queue = stage == "queue" and order["turn"] == self._index and phase != "failed"
        if not self._is_next_in_queue:
            self._dequeue()
        if self._index in order["release"]:
            self.release()
        if stage in ("stop", "end"):
            self.stop(attempt, 0.0 if order["at_once"] else math.inf)
        elif stage in ("setup", "arm", "go") and phase == "waiting":
            self._begin_setup()
        elif stage == "setup" and phase == "stopped" and attempt > self.state["attempt"]:
            if not self.state["message"]:
                self._begin_setup(attempt=attempt)
        elif stage == "arm" and is_member and phase == "ready":
            self._arm(order)
        elif stage == "go" and is_member and phase == "armed" and attempt == self.state["attempt"]:
            self._start(order)

    def stop(self, attempt: int, within_s: float = math.inf) -> None:
        """End what runs, with SIGTERM, the job's grace and SIGKILL, until nothing of the job is left.

        After `within_s` seconds there is no grace for anything: other hosts may continue the job.
        """
        if self.stopped and self.state["attempt"] >= attempt:
            return
        self._attempt_stopped = attempt
        self._dequeue()
        now = time.monotonic()
        if self.state["phase"] != "stopping":
            self._set("stopping")
            self._kill_at, self._grace_ends_at = now + self._settings["grace_s"] + ALLOWANCE_S, math.inf
            if within_s > 0 and self._process is not None and self._process.poll() is None:
                self._process.terminate()
        self._grace_ends_at = min(self._grace_ends_at, now + within_s)

    def release(self) -> None:
        """Release this host's slots and leave its queue."""
        self._dequeue()
        self._slots.release()
        if self.state["holds"]:
            self.state = {**self.state, "holds": False}

    def _dequeue(self) -> None:
        self._is_next_in_queue = False
        self._slots.dequeue()
        if self.state["waits"]:
            self.state = {**self.state, "waits": ""}

    @property
    def stopped(self) -> bool:
        return bool(self.state["phase"] in ("stopped", "ended"))

    def tick(self) -> None:
        """Take the next step. Call it after every change of a child process, and now and then."""
        self._reap_adopted()
        self._note_sizes()
        if self._is_next_in_queue and not self.state["holds"] and time.monotonic() >= self._next_look_at:
            self._acquire_slots()
        phase = self.state["phase"]
        if phase == "setup":
            self._continue_setup()
        elif phase == "running":
            assert self._process is not None
            announcement = self._announcements.take() if self._announcements is not None else ""
            if announcement:  # this host will be taken away: the launcher warns the ranks on SIGUSR1
                log(f"{announcement}: warning the ranks")
                self._process.send_signal(signal.SIGUSR1)
            code = self._process.poll()
            if code is not None and self._reaper.done(LEFTOVER_GRACE_S):
                self._note_sizes(now=True)
                self._process = None
                self._set("done", code=as_exit_code(code), report=self._report(), warning=self._warning())
        elif phase == "stopping":
            now = time.monotonic()
            if self._process is not None and self._process.poll() is None:
                if now < min(self._kill_at, self._grace_ends_at):
                    return
                self._process.kill()
            if self._reaper.done(LEFTOVER_GRACE_S if now < self._grace_ends_at else 0.0):
                self._note_sizes(now=True)
                self._process = None
                self._set("stopped", attempt=self._attempt_stopped, warning=self._warning())

    def _warning(self) -> str:
        full = logs.FULL if logs.FULL in self.state["warning"] else ""
        return "; ".join(filter(None, (full, self._reaper.warning)))

    def _reap_adopted(self) -> None:
        """Reap orphans of the job that have ended, which would stay as zombies."""
        with contextlib.suppress(ChildProcessError):
            while True:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if child is None or (self._process is not None and child.si_pid == self._process.pid):
                    return  # that one is polled by its owner
                os.waitpid(child.si_pid, os.WNOHANG)

    def _acquire_slots(self) -> None:
        """Acquire the slots if they are free and it is this job's turn."""
        job = self._settings["queue"]
        try:
            slots, reason = self._slots.try_acquire(required_slots(job, job["devices"]))
        except (NotEnoughSlots, OSError) as error:
            self._fail(1, str(error))
            return
        self._next_look_at = time.monotonic() + self._slots.pause_s
        self._visible = visible(slots, job["devices"])
        self.state = {**self.state, "holds": not reason, "waits": reason}

    # Setup.

    def _begin_setup(self, **facts: Any) -> None:
        """Start the setup commands, or continue with the one that the end of an attempt interrupted."""
        if self._remaining_setup is None:
            self._remaining_setup = [list(argv) for argv in self._settings["setup"]]
        self._set("setup", **facts)
        self._continue_setup()

    def _continue_setup(self) -> None:
        commands = self._remaining_setup
        assert commands is not None
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if code != 0:
                self._fail(as_exit_code(code), f"the setup command {commands[0][0]!r} failed with exit code {code}")
                return
            commands.pop(0)
        if not commands:
            self._set("ready")
            return
        try:
            self._process = self._run(commands[0], "setup.log", {})
        except OSError as error:
            self._fail(127, f"the setup command {commands[0][0]!r} cannot be run: {error.strerror}")

    def _fail(self, code: int, message: str) -> None:
        self._set("failed", code=code, message=message)

    # The ranks.

    def _arm(self, order: dict[str, Any]) -> None:
        """Become ready to start; on node 0, with a port for the ranks' rendezvous."""
        attempt, port = int(order["attempt"]), 0
        if order["members"][0] == self._index:
            first, last = self._settings["ports"]
            port = wire.free_port(self._settings["master_port"] if attempt == 0 else None, first, last)
            if not port:
                self._fail(1, f"none of its ports {first}-{last} is free for the rendezvous")
                return
        self._set("armed", attempt=attempt, port=port)

    def _start(self, order: dict[str, Any]) -> None:
        members, attempt = list(order["members"]), int(order["attempt"])
        self.rank = members.index(self._index)
        self._reaper = ProcessReaper(self._settings["job_id"])
        try:
            command = self._command(order, len(members))
            for name in ("launch.jsonl", f"node-{self._index}.log"):
                preallocate(os.path.join(self._logs, name))
            self._events_from = logs.size_of(os.path.join(self._logs, "launch.jsonl"))
            slots = ",".join(map(str, self._slots.fds))
            variables = {"ACCEL_ATTEMPT": str(attempt), "ACCEL_JOB_SLOTS": slots}
            self._process = self._run(command, f"node-{self._index}.log", variables, pass_fds=self._slots.fds)
            self._set("running")
        except OSError as error:
            message = f"cannot run {command[0]!r}: {error.strerror}"
            report = {"failure": None, "refused": "setup", "words": message, "ended": time.time()}
            self._set("done", code=127, report=report)

    def _command(self, order: dict[str, Any], nodes: int) -> list[str]:
        settings = self._settings
        flags = {
            "num_machines": nodes,
            "machine_rank": self.rank,
            "main_process_ip": order["address"],
            "main_process_port": order["port"],
            "log_dir": self._logs,
            "max_restarts": 0,
            "shutdown_timeout": settings["grace_s"],
            # Supervisors notice a lost host first and end every launcher: none has to wait for the others.
            "rdzv_conf": f"timeout={settings['start_timeout_s']:g},stay=0,"
            f"lost_after={2 * settings['heartbeat_s'] + 10:g}",
        }
        if settings["procs_per_node"] is not None:
            flags["num_processes"] = nodes * settings["procs_per_node"]
        command = list(settings["command"])
        index = command.index("launch") + 1
        arguments = [argument for name, value in flags.items() for argument in (f"--{name}", str(value))]
        return [*command[:index], *arguments, *command[index:]]

    def _run(
        self, argv: list[str], log_name: str, extra: dict[str, str], pass_fds: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        own_pid, warned = os.getpid(), self._announcements is not None and log_name != "setup.log"

        def prepare_child() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES_LIMIT)
            os.umask(UMASK)
            die_with_parent(signal.SIGTERM, own_pid)
            if warned:  # the signal must not end a launcher without its handler yet
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        env = {name: value for name, value in os.environ.items() if name not in _SESSION_VARIABLES}
        python = self._settings["command"][0]
        interpreter = _interpreter_env(python, env.get("PATH") or os.defpath)
        env.update(interpreter)
        for name, value in self._network().items():
            env.setdefault(name, value)
        own = {**self._visible, **self._settings["env"], **self._secrets}
        if self._secrets:
            own["ACCEL_SECRETS"] = ",".join(self._secrets)
        own.update({JOB_MARK: self._settings["job_id"], "ACCEL_JOB_DIR": self._directory, **extra})
        env.update(own)
        prologue = list(self._settings.get("prologue", ()))
        if prologue:
            if "PATH" in interpreter:
                prologue.append(f"export PATH={shlex.quote(os.path.dirname(python))}:$PATH")
            argv = _in_login_shell(prologue, argv, env, own)
        workdir = os.path.join(self._directory, os.path.expanduser(self._settings["workdir"]))
        if not os.path.isdir(workdir):
            raise NotADirectoryError(0, f"directory {workdir} does not exist")
        with open(os.path.join(self._logs, log_name), "ab") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=workdir, env=env,
                start_new_session=True, preexec_fn=prepare_child, pass_fds=pass_fds,
            )  # fmt: skip

    def _network(self) -> dict[str, str]:
        """Return the variables that select the interface between hosts.

        Without them, gloo uses the address of the host's own name, often the loopback's, and NCCL any network.
        """
        hosts = self._settings["nodes"] + self._settings["spares"]
        interface = hosts[self._index]["interface"]
        if interface is None or len(hosts) == 1:
            return {}
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}

    def _report(self) -> dict[str, Any]:
        path = os.path.join(self._logs, "launch.jsonl")
        names = ("failure", "refused", "attempt")
        events = [event for event in logs.json_lines(path, self._events_from) if event.get("event") in names]
        attempt = self.state["attempt"]
        failures = [event["failure"] for event in events if event["event"] == "failure"]
        failures = [failure for failure in failures if failure["attempt"] == attempt]
        started = any(event["event"] == "attempt" and event["attempt"] == attempt for event in events)
        reason = events[-1]["reason"] if events and events[-1]["event"] == "refused" else None
        return {
            "failure": failures[-1] if failures else None,
            "refused": reason or ("exit_code" if started else "setup"),
            "words": self._last_log_line(),
            "ended": time.time(),
        }

    def _last_log_line(self) -> str:
        line = logs.last_line(os.path.join(self._logs, f"node-{self._index}.log"), logs.BLOCK)
        line = redact(line, self._secrets)[:_MAX_MESSAGE]
        return line[len("accel launch: ") :] if line.startswith("accel launch: ") else line

    # Bookkeeping.

    def _set(self, phase: str, **facts: Any) -> None:
        self.state = {**self.state, "phase": phase, **facts}

    def _note_sizes(self, now: bool = False) -> None:
        """Record the sizes of the logs, which give the position in a log at a given time."""
        if not now and time.monotonic() < self._noted_at + NOTE_S:
            return
        self._noted_at = time.monotonic()
        self._clock.note()
        if self._clock.full:
            self._report_full_disk()

    def _report_full_disk(self) -> None:
        """Report once, in the job's log and its result, that lines of the ranks may be lost."""
        if self._process is None or self.state["phase"] == "setup" or self.state["warning"]:
            return
        self.state = {**self.state, "warning": logs.FULL}
        path = os.path.join(self._logs, f"node-{self._index}.log")
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(f"accel: the disk that holds {self._logs} is full: lines of the ranks may be lost\n".encode())


def _interpreter_env(python: str, path: str) -> dict[str, str]:
    """Return the variables that make the interpreter's `python`, `pip` and other programs the first on PATH."""
    folder = os.path.dirname(python)
    env = {}
    if folder and shutil.which(os.path.basename(python), path=path) != python:
        env["PATH"] = os.pathsep.join((folder, path))
    if os.path.exists(os.path.join(os.path.dirname(folder), "pyvenv.cfg")):
        env["VIRTUAL_ENV"] = os.path.dirname(folder)
    return env


def _in_login_shell(lines: list[str], argv: list[str], env: dict[str, str], own: dict[str, str]) -> list[str]:
    """Return a command that runs the lines in a login shell, whose profile may define `module`, and then `argv`.

    The job's `own` variables in `env` win over the profile and the lines: copies restore them. They are not in the
    command, which everybody on the host can read.
    """
    env.update({f"{_COPY}{name}": value for name, value in own.items()})
    restored = [f'export {name}="${_COPY}{name}"; unset {_COPY}{name}' for name in own]
    return ["bash", "-lc", "\n".join([*lines, *restored, 'exec "$@"']), "bash", *argv]


class Announcements:
    """Maintenance and preemption notices from Google Cloud's metadata server, by threads that end with the process.

    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and …/docs/instances/create-use-spot
    """

    def __init__(self, server: str) -> None:
        from http.client import HTTPException
        from urllib import request  # slower to import than all else in a supervisor

        self._errors = (OSError, ValueError, HTTPException)

        self._new: list[str] = []
        opener = request.build_opener(request.ProxyHandler({}))  # the server is this machine's own
        opener.addheaders = [("Metadata-Flavor", "Google")]
        for key in _QUIET:
            url = f"http://{server}/computeMetadata/v1/instance/{key}"
            threading.Thread(target=self._poll_server, args=(opener, key, url), daemon=True).start()

    def take(self) -> str:
        """Return the oldest notice that was not returned before, or ""."""
        return self._new.pop(0) if self._new else ""

    def _poll_server(self, opener: OpenerDirector, key: str, url: str) -> None:
        etag, previous = "0", _QUIET[key]
        while True:
            query = f"{url}?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={etag}"
            try:
                with opener.open(query, timeout=_WAIT_S + _ALLOWANCE_S) as response:
                    etag, event = response.headers.get("ETag", "0"), response.read().decode().strip()
            except self._errors:
                time.sleep(_RETRY_S)
                continue
            if event not in (previous, _QUIET[key]):
                self._new.append(f"{key}: {event}")
            previous = event
