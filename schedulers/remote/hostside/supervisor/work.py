"""What runs on this host for the job: setup commands, then `accel launch`; and how all of it is ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import time

from . import wire
from .documents import make_room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MARKER = "ACCEL_JOB_ID"  # in the environment of everything that a job starts
ALLOWANCE_S = 6.0  # for `accel launch` to end its ranks after their grace
LEFTOVER_GRACE_S = 1.0
NOTE_S = 1.0
FULL_BYTES = 1 << 16
FULL = "its disk was full: lines of its logs are missing"
FILES_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)  # as it was when this program began
_LONGEST_WORDS = 500
_TAIL = 1 << 16
_STARTED = 19  # of the fields of /proc/PID/stat that come after the name
_OF_THE_SESSION = ("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "SSH_ORIGINAL_COMMAND")
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Work:
    """This host's part of the job. `state` is what the leader is told of it; `tick` lets it come true."""

    def __init__(self, settings: dict[str, Any], directory: str, secrets: dict[str, str]) -> None:
        self._settings = settings
        self._directory = directory
        self._logs = os.path.join(directory, "logs")
        self._secrets = secrets
        self._index = int(settings["node"])
        self._process: subprocess.Popen[bytes] | None = None
        self._setup_left: list[list[str]] | None = None
        self._ending = Ending(settings["job_id"])
        self._kill_at: float | None = None
        self._sizes: dict[str, int] = {}
        self._noted = 0.0
        self.rank = -1
        self.state: dict[str, Any] = {
            "phase": "waiting", "attempt": 0, "port": 0, "code": None, "report": None, "message": "", "warning": "",
            "cancel": False,
        }  # fmt: skip

    def obey(self, order: dict[str, Any]) -> None:
        """Begins what an order asks for; the same one may come any number of times."""
        do, phase, attempt = order["do"], self.state["phase"], int(order["attempt"])
        mine = self._index in order["members"]
        if do in ("stop", "end"):
            self.stop(attempt)
        elif do in ("setup", "arm", "go") and phase == "waiting":
            self._begin_setup()
        elif do == "setup" and phase == "stopped" and attempt > self.state["attempt"]:
            if not self.state["message"]:
                self._begin_setup(attempt=attempt)
        elif do == "arm" and mine and phase == "ready":
            wanted = self._settings["master_port"] if attempt == 0 else 0
            self._set("armed", attempt=attempt, port=wire.free_port(wanted))
        elif do == "go" and mine and phase == "armed" and attempt == self.state["attempt"]:
            self._start(order)

    def stop(self, attempt: int) -> None:
        """Ends in order whatever runs: SIGTERM, the job's grace, SIGKILL, and nothing of the job is left."""
        if self.state["phase"] in ("stopped", "ended") and self.state["attempt"] >= attempt:
            return
        self._attempt_stopped = attempt
        if self.state["phase"] != "stopping":
            self._set("stopping")
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                self._kill_at = time.monotonic() + self._settings["grace_s"] + ALLOWANCE_S
            elif self._process is None:
                self._kill_at = None

    @property
    def stopped(self) -> bool:
        return bool(self.state["phase"] in ("stopped", "ended"))

    def tick(self) -> None:
        """Looks at what runs. To be called after every change of a child, and now and then."""
        self._collect_adopted()
        self._note_sizes()
        phase = self.state["phase"]
        if phase == "setup":
            self._go_on_with_setup()
        elif phase == "running":
            assert self._process is not None
            code = self._process.poll()
            if code is not None and self._ending.done(LEFTOVER_GRACE_S):
                self._note_sizes(now=True)
                self._process = None
                self._set("done", code=_as_exit_code(code), report=self._report())
        elif phase == "stopping":
            if self._process is not None and self._process.poll() is None:
                if self._kill_at is None or time.monotonic() < self._kill_at:
                    return
                self._process.kill()
            if self._ending.done(LEFTOVER_GRACE_S):
                self._note_sizes(now=True)
                self._process = None
                self._set("stopped", attempt=self._attempt_stopped)

    def _collect_adopted(self) -> None:
        """Those that the job has left to themselves and that have ended since, lest they stay as zombies."""
        with contextlib.suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or (self._process is not None and ended.si_pid == self._process.pid):
                    return  # that one is asked after by its owner
                os.waitpid(ended.si_pid, os.WNOHANG)

    # Setup.

    def _begin_setup(self, **facts: Any) -> None:
        """From its beginning, or from the command that the end of an attempt has interrupted."""
        if self._setup_left is None:
            self._setup_left = [list(argv) for argv in self._settings["setup"]]
        self._set("setup", **facts)
        self._go_on_with_setup()

    def _go_on_with_setup(self) -> None:
        left = self._setup_left
        assert left is not None
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if code != 0:
                self._fail(_as_exit_code(code), f"the setup command {left[0][0]!r} failed with exit code {code}")
                return
            left.pop(0)
        if not left:
            self._set("ready")
            return
        try:
            self._process = self._run(left[0], "setup.log", {})
        except OSError as error:
            self._fail(127, f"the setup command {left[0][0]!r} cannot be run: {error.strerror}")

    def _fail(self, code: int, message: str) -> None:
        self._set("failed", code=code, message=message)

    # The ranks.

    def _start(self, order: dict[str, Any]) -> None:
        members, attempt = list(order["members"]), int(order["attempt"])
        self.rank = members.index(self._index)
        self._ending = Ending(self._settings["job_id"])
        try:
            command = self._command(order, len(members))
            for name in ("launch.jsonl", f"node-{self._index}.log"):
                make_room(os.path.join(self._logs, name))
            self._process = self._run(command, f"node-{self._index}.log", {"ACCEL_ATTEMPT": str(attempt)})
            self._set("running")
        except OSError as error:
            words = f"cannot run {command[0]!r}: {error.strerror}"
            report = {"failure": None, "refused": "setup", "words": words, "ended": time.time()}
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
            # The supervisors notice first, know more, and tell every launcher when to end: none stays for the others.
            "rdzv_conf": f"timeout={settings['start_timeout_s']:g},stay=0,"
            f"lost_after={2 * settings['heartbeat_s'] + 10:g}",
        }
        if settings["procs_per_node"] is not None:
            flags["num_processes"] = nodes * settings["procs_per_node"]
        command = list(settings["command"])
        at = command.index("launch") + 1
        return (
            command[:at] + [word for name, value in flags.items() for word in (f"--{name}", str(value))] + command[at:]
        )

    def _run(self, argv: list[str], log: str, extra: dict[str, str]) -> subprocess.Popen[bytes]:
        own = os.getpid()

        def enter() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES_LIMIT)
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != own:
                os._exit(128 + signal.SIGTERM)

        env = {name: value for name, value in os.environ.items() if name not in _OF_THE_SESSION}
        env.update(self._settings["env"])
        env.update(self._secrets)
        env.update({MARKER: self._settings["job_id"], "ACCEL_JOB_DIR": self._directory})
        env.update(extra)
        workdir = os.path.join(self._directory, os.path.expanduser(self._settings["workdir"]))
        if not os.path.isdir(workdir):
            raise NotADirectoryError(0, f"there is no directory {workdir}")
        with open(os.path.join(self._logs, log), "ab") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=workdir, env=env,
                start_new_session=True, preexec_fn=enter,
            )  # fmt: skip

    def _report(self) -> dict[str, Any]:
        events = [event for event in self._events() if event.get("event") in ("failure", "refused", "attempt")]
        attempt = self.state["attempt"]
        failures = [event["failure"] for event in events if event["event"] == "failure"]
        failures = [failure for failure in failures if failure["attempt"] == attempt]
        started = any(event["event"] == "attempt" and event["attempt"] == attempt for event in events)
        refused = events[-1]["reason"] if events and events[-1]["event"] == "refused" else None
        return {
            "failure": failures[-1] if failures else None,
            "refused": refused or ("exit_code" if started else "setup"),
            "words": self._last_words(),
            "ended": time.time(),
        }

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            with open(os.path.join(self._logs, "launch.jsonl"), errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:  # cut short by a crash
                continue

    def _last_words(self) -> str:
        try:
            with open(os.path.join(self._logs, f"node-{self._index}.log"), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        words = lines[-1][:_LONGEST_WORDS] if lines else ""
        return words[len("accel launch: ") :] if words.startswith("accel launch: ") else words

    # Bookkeeping.

    def _set(self, phase: str, **facts: Any) -> None:
        self.state = {**self.state, "phase": phase, **facts}

    def _note_sizes(self, now: bool = False) -> None:
        """Notes how long the logs are, so that lines which carry no time can be asked for by it."""
        if not now and time.monotonic() < self._noted + NOTE_S:
            return
        self._noted = time.monotonic()
        free = os.statvfs(self._logs)
        if free.f_bavail * free.f_frsize < FULL_BYTES:
            self._say_that_it_is_full()
        sizes = {}
        for entry in os.scandir(self._logs):
            if entry.name.endswith(".log"):
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name[: -len(".log")]] = entry.stat().st_size
        if sizes == self._sizes:
            return
        self._sizes = sizes
        line = json.dumps({"schema": 1, "time": time.time(), "sizes": sizes}) + "\n"
        try:
            with open(os.path.join(self._logs, "sizes.jsonl"), "ab", buffering=0) as file:
                file.write(line.encode())
        except OSError:  # a full disk loses the note, not the job
            self._say_that_it_is_full()

    def _say_that_it_is_full(self) -> None:
        """Once, where the job's log lines are read, for those of the ranks may be lost; and in how the job ends."""
        if self._process is None or self.state["phase"] == "setup" or self.state["warning"]:
            return
        self.state = {**self.state, "warning": FULL}
        path = os.path.join(self._logs, f"node-{self._index}.log")
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(f"accel: the disk that holds {self._logs} is full: lines of the ranks are lost\n".encode())


class Ending:
    """Ends everything of a job on this host but the supervisor: SIGTERM, then SIGKILL until nothing is left."""

    def __init__(self, job_id: str) -> None:
        self._mark = os.fsencode(f"{MARKER}={job_id}")
        self._began: float | None = None
        self._told: set[tuple[int, bytes]] = set()

    def done(self, grace_s: float) -> bool:
        """Goes on with it, without waiting; True once nothing is left. To be called again until then."""
        left = self._left()
        if not left:
            self._began, self._told = None, set()
            return True
        now = time.monotonic()
        if self._began is None:
            self._began = now
        late = now - self._began >= grace_s
        for pid, started in left if late else left - self._told:
            _send(pid, started, signal.SIGKILL if late else signal.SIGTERM)
        self._told |= left
        return False

    def _left(self) -> set[tuple[int, bytes]]:
        """Process ids, each with when it was started: numbers are used again."""
        own = os.getpid()
        parents: dict[int, int] = {}
        found: dict[int, bytes] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                fields = _stat(name)
            except OSError:
                continue
            pid = int(name)
            parents[pid] = int(fields[1])
            if fields[0] in b"ZX":
                _collect(pid if parents[pid] == own else 0)
            else:
                found[pid] = fields[_STARTED]
        return {
            (pid, started)
            for pid, started in found.items()
            if pid != own and (_below(pid, own, parents) or self._marked(pid))
        }

    def _marked(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._mark in file.read().split(b"\0")
        except OSError:
            return False


def _stat(pid: int | str) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _send(pid: int, started: bytes, signum: int) -> None:
    """To that process and no other that has come to its number since."""
    with contextlib.suppress(OSError):  # gone, or a set-user-id program that only root may end
        if not hasattr(os, "pidfd_open"):  # Python 3.8
            if _stat(pid)[_STARTED] == started:
                os.kill(pid, signum)
            return
        handle = os.pidfd_open(pid)
        try:
            if _stat(pid)[_STARTED] == started:
                signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)


def _below(pid: int, top: int, parents: dict[int, int]) -> bool:
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == top:
            return True
    return False


def _collect(pid: int) -> None:
    if pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return


def _as_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
