"""One node's part of a Slurm job. submitit calls it once per node, and it runs until the ranks have ended.

The reach of Slurm's signals depends on its configuration: with proctrack/cgroup only this process receives
them, with proctrack/linuxproc every process of the step, ranks and launcher included. So this process
forwards each once, and receivers must tolerate it twice. It alone knows that the job was cancelled through
accel, or that a later start of the job has begun.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..node import logs, probe
from ..node.redaction import redact
from ..processes import adopt_orphans, as_exit_code, descendants, die_with_parent, end_all, wake_pipe
from .batch import shared_files

REQUEUE = 85
# The launcher has finished when `main` returns; a regular interpreter exit would take a second.
_ACCEL = "import os, sys; sys.path[:] = [p for p in sys.path if p]; from accel.cli import main; os._exit(main())"
_ENTRY = {"script": [], "module": ["-m"], "command": ["--no_python"]}
_FILE_CHECK_S = 1.0
_KILL_ALLOWANCE_S = 6.0
_LEFTOVER_GRACE_S = 2.0
_MAX_MESSAGE = 500
_WRITE_S = 20.0
# With submitit's variables the program would take itself for a submitit task; accel's are set for this node.
_NOT_INHERITED = ("SUBMITIT_", "ACCEL_")


class Ended(Exception):
    """The node's part ended before, or without, its ranks. `refused`: a reason as in `accel launch`."""

    def __init__(self, code: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.refused = code, message, reason


@dataclass(frozen=True)
class NodeMain:
    """A callable that runs this node's part of the job in `directory`, writes its report and returns its exit code.

    Picklable by its name and one string. Raises SystemExit with the exit code if the report cannot be written.
    """

    directory: str

    def __call__(self) -> int:
        node = Node(self.directory)
        return node.run()


class Node:
    def __init__(self, directory: str) -> None:
        self._stop_cause: str | None = None
        self._warnings: list[int] = []
        self._woken, waker = wake_pipe()
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_end)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda received, _: self._warnings.append(received))
        for signum in (signal.SIGCONT, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)
        adopt_orphans()
        self._directory = directory
        self._settings: dict[str, Any] = json.loads(_text(os.path.join(directory, "slurm", "settings.json")))
        self._rank = int(os.environ["SLURM_NODEID"])
        self._attempt = int(os.environ["ACCEL_ATTEMPT"])
        self._own = os.path.join(directory, "slurm")
        self._marks = os.path.join(self._own, "nodes", f"a{self._attempt}")
        self._logs = os.path.join(directory, "logs")
        # Nodes do not write to one file together: over NFS they would write over each other.
        rank_events = os.path.join(self._marks, f"{self._rank}.jsonl")
        self._events = os.path.join(self._logs, "launch.jsonl") if self._rank == 0 else rank_events
        self._read_from = logs.size_of(self._events)
        self._next_file_check = 0.0

    def run(self) -> int:
        try:
            self._mark("begun")
            if self._fenced():
                self._stop_cause = "fence"
                raise Ended(1, "a later start of the job has begun")
            self._set_up()
            code = self._watch(self._start(self._command(), None), None)
            message, reason = self._last_log_line(), None
        except Ended as end:
            code, message, reason = end.code, end.message, end.refused
        except OSError as error:
            code, message, reason = 1, f"{error.filename or 'a file'}: {error.strerror or error}", "setup"
        grace_s = 0.0 if self._stop_cause == "fence" else _LEFTOVER_GRACE_S
        end_all(lambda: descendants(os.getpid()), grace_s=grace_s)
        self._report(code, message, reason)
        return code

    # The setup and the launcher's command.

    def _set_up(self) -> None:
        for argv in self._settings["setup"]:
            try:
                code = self._watch(self._start(argv, "setup.log"), 0.0)
            except OSError as error:
                raise Ended(127, f"the setup command {argv[0]!r} cannot be run: {error.strerror}", "setup") from None
            if self._stop_cause:
                raise Ended(128 + signal.SIGTERM, f"stopped by {self._stop_cause} during its setup")
            if code:
                raise Ended(code, f"the setup command {argv[0]!r} failed with exit code {code}", "setup")
        if self._settings["setup"]:
            self._await_others()

    def _await_others(self) -> None:
        """Wait for the other nodes' setup, which may last longer than their rendezvous would wait."""
        self._mark("ready")
        nodes = int(self._settings["nodes"])
        pause_s = max(0.25, nodes / 200)
        while True:
            names = os.listdir(self._marks)
            if sum(name.endswith(".ready") for name in names) >= nodes:
                return
            if any(name.endswith(".json") for name in names):
                raise Ended(1, "another node ended before all nodes were set up", "rendezvous")
            if self._end_requested():
                raise Ended(128 + signal.SIGTERM, f"stopped by {self._stop_cause} during the setup of other nodes")
            select.select([self._woken], [], [], pause_s)
            self._drain()

    def _command(self) -> list[str]:
        settings = self._settings
        remaining = max(0, int(settings["max_restarts"]) - self._attempt)
        flags = {
            "log_dir": self._logs,
            "max_restarts": remaining,
            "shutdown_timeout": f"{settings['grace_s']:g}",
            "rdzv_conf": f"timeout={settings['start_timeout_s']:g}",
        }
        if settings["procs_per_node"] is not None:
            flags["num_processes"] = int(settings["procs_per_node"]) * int(settings["nodes"])
        arguments = [argument for name, value in flags.items() for argument in (f"--{name}", str(value))]
        arguments += [*settings["launch"], *_ENTRY[settings["entry"]], "--", *settings["argv"]]
        return [settings["python"], "-c", _ACCEL, "launch", *arguments]

    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        values = {name: os.environ[f"ACCEL_{name}"] for name in ("MASTER", "PORT", "ATTEMPT", "NODE_NAMES", "JOB_ID")}
        values |= {
            "NODE_RANK": str(self._rank),
            "NODES": str(self._settings["nodes"]),
            "JOB_DIR": self._directory,
            "FENCE": os.path.join(self._own, "attempt"),
            "LAUNCH_EVENTS": self._events,
            "REQUEUED": "1",
        }
        if self._secrets:
            values["SECRETS"] = ",".join(self._secrets)
        variables = {f"ACCEL_{name}": values[name] for name in values}
        return {**self._interface_variables, **inherited, **self._settings["env"], **self._secrets, **variables}

    @functools.cached_property
    def _secrets(self) -> dict[str, str]:
        """The values of the secrets that the settings name. Raises Ended if one is missing."""
        names: list[str] = self._settings.get("secrets", [])
        path = os.path.join(self._own, "secrets.json")
        try:
            values: dict[str, str] = json.loads(_text(path)) if names else {}
        except (FileNotFoundError, ValueError):
            values = {}
        missing = ", ".join(name for name in names if name not in values)
        if missing:
            raise Ended(1, f"secrets {missing}: no values in {path}. Submit the job again.", "setup")
        return values

    @functools.cached_property
    def _interface_variables(self) -> dict[str, str]:
        """The variables that select the ranks' network interface, unless the user sets them."""
        interface = self._settings.get("interface")
        if interface is not None:
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        if int(self._settings["nodes"]) == 1:
            return {}
        names = os.environ["ACCEL_NODE_NAMES"].split(",")
        gloo_interface = _gloo_interface(names[1] if self._rank == 0 else os.environ["ACCEL_MASTER"])
        return {} if gloo_interface is None else {"GLOO_SOCKET_IFNAME": gloo_interface}

    def _start(self, argv: list[str], log: str | None) -> subprocess.Popen[bytes]:
        """Start a child, which gets SIGTERM when this process is killed and shares its output unless `log` is set."""
        parent_pid = os.getpid()
        workdir = os.path.join(self._directory, self._settings["workdir"])
        if not os.path.isdir(workdir):
            raise Ended(1, f"directory not found: {workdir}. Set `snapshot: true` to run a copy", "setup")

        def enter() -> None:
            die_with_parent(signal.SIGTERM, parent_pid)
            for signum in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(signum, signal.SIG_IGN)

        with contextlib.ExitStack() as stack:
            # accel's runtime refuses to be one of several tasks, unless it is meant to be alone as a setup command is.
            env = self._environment() | ({} if log is None else {"WORLD_SIZE": "1"})
            output = None if log is None else stack.enter_context(open(os.path.join(self._logs, log), "ab"))
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=workdir, env=env,
                preexec_fn=enter,
            )  # fmt: skip

    # Supervision of a child process.

    def _watch(self, process: subprocess.Popen[bytes], grace_s: float | None) -> int:
        """Wait for the process and forward signals to it. Kill it after its grace period, or at once if fenced."""
        allowed_s = self._settings["grace_s"] + _KILL_ALLOWANCE_S if grace_s is None else grace_s
        forwarded = False
        kill_at = float("inf")
        while (code := process.poll()) is None:
            if self._end_requested() and kill_at == float("inf"):
                kill_at = time.monotonic() + allowed_s
            if self._stop_cause == "fence":
                end_all(lambda: descendants(os.getpid()) if process.poll() is None else (), grace_s=0)
                return 128 + signal.SIGKILL
            if self._stop_cause and not forwarded:
                forwarded = True
                process.terminate()
            while self._warnings and grace_s is None:
                process.send_signal(self._warnings.pop(0))
                with contextlib.suppress(OSError):
                    self._mark("warned")
            if time.monotonic() >= kill_at:
                process.kill()
            select.select([self._woken], [], [], 0.5)
            self._drain()
        return as_exit_code(code)

    def _end_requested(self) -> bool:
        """Return True if the node must end. Checks files now and then; signals are recorded as they arrive."""
        now = time.monotonic()
        if now >= self._next_file_check:
            self._next_file_check = now + _FILE_CHECK_S
            if self._fenced():
                self._stop_cause = "fence"
            elif self._stop_cause is None and shared_files.exists(os.path.join(self._own, "cancel")):
                self._stop_cause = "cancel"
        return self._stop_cause is not None

    def _fenced(self) -> bool:
        return shared_files.fenced(os.path.join(self._own, "attempt"), self._attempt)

    def _on_end(self, signum: int, _: FrameType | None) -> None:
        if self._stop_cause is None:
            self._stop_cause = signal.Signals(signum).name

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    # Files for the batch program.

    def _mark(self, suffix: str) -> None:
        os.close(os.open(os.path.join(self._marks, f"{self._rank}.{suffix}"), os.O_WRONLY | os.O_CREAT, 0o600))

    def _report(self, code: int, message: str, reason: str | None) -> None:
        failure, started = None, False
        for event in logs.json_lines(self._events, self._read_from):
            if event.get("event") == "failure" and event["failure"]["attempt"] >= self._attempt:
                failure = event["failure"]
            elif event.get("event") == "attempt":
                failure, reason, started = None, None, True
            elif event.get("event") == "refused":
                reason = event["reason"]
        if code and not started and not self._stop_cause:
            reason = reason or "setup"  # `accel launch` rejected it
        report = {
            "schema": shared_files.SCHEMA, "node": self._rank, "name": os.environ.get("SLURMD_NODENAME", ""),
            "host": socket.gethostname(), "attempt": self._attempt, "code": code, "failure": failure,
            "refused": reason, "words": message, "preempted": code == REQUEUE,
            "told": self._stop_cause, "at": time.time(),
        }  # fmt: skip
        path, spare = os.path.join(self._marks, f"{self._rank}.json"), os.path.join(self._own, "spare")
        deadline = time.monotonic() + _WRITE_S
        while True:
            try:
                shared_files.write(path, json.dumps(report), spare)
                return
            except OSError as error:
                if time.monotonic() >= deadline or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise SystemExit(code or 1) from None
                time.sleep(1)

    def _last_log_line(self) -> str:
        """Return the last line that `accel launch` wrote in this attempt."""
        path = os.path.join(self._logs, f"node-{self._rank}.log")
        line = redact(logs.last_line(path, logs.BLOCK), self._secrets)
        return line.removeprefix("accel launch: ")[:_MAX_MESSAGE]


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _gloo_interface(peer: str) -> str | None:
    """Return the interface over which this node reaches `peer`; None if gloo needs none or it is unknown.

    By default gloo listens on the address of the node's own name. No other node reaches that if the name has no
    address, or a line `127.0.1.1 NAME` in /etc/hosts, which Debian's installer writes.

    https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
    (createDefaultDevice)
    """
    if any(not _is_loopback(address) for address in _addresses(socket.gethostname())):
        return None
    routes = {address: interface for interface, address in probe.ipv4() + probe.ipv6() if interface != "lo"}
    return next(
        (routes[local_address] for address in _addresses(peer) if (local_address := _own_towards(address)) in routes),
        None,
    )


def _addresses(name: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in infos]


def _is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _own_towards(address: str) -> str | None:
    """Return this machine's source address for packets to that address. Sends none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        return str(sock.getsockname()[0]).removeprefix("::ffff:")
    return None
