"""The fork server: a process with torch loaded that forks every rank, and ends the gang if the launcher dies.

    launcher (elastic agent) ──socket──► fork server ──fork──► rank 0 … N-1

The launcher sends JSON lines to start, signal and end ranks; the server reports every exit. When the
launcher's end of the socket closes, for any reason, the server ends the gang gracefully and exits. When
the server dies, the kernel kills the ranks (PR_SET_PDEATHSIG) and the launcher, which adopts the orphans,
ends the rest. The server never runs user code and starts no thread, so that it can fork safely at any time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from schedulers.processes import adopt_orphans, descendants, signal_name, wake_pipe

from . import alias_env, watchdog
from .worker import WARNINGS, Program, enter_rank, exit_with_error, run

# Modules that the server imports besides torch, so that ranks need not import them each.

# A process's first optimizer imports torch._dynamo, which takes 1.4 s: once here instead of in every rank. Programs
# without an optimizer should not wait for it. A wrong guess from the program's text costs only time.
_USES_OPTIMIZER = re.compile(rb"\boptim\b|\bAdamW?\b|\bSGD\b|accelerat|transformers|lightning|\baccel\b|torch\.compile")
_IMPORTS_HF = re.compile(rb"^\s*(?:from|import)\s+(?:accelerate|transformers|peft|trl)\b", re.MULTILINE)
_IMPORTS_ACCEL = re.compile(rb"^\s*(?:from|import)\s+accel\b", re.MULTILINE)


def modules_for(program: Program) -> list[str]:
    """Return the names of the modules that the program will probably import."""
    text = _source(program)
    names = ["torch._dynamo"] if _USES_OPTIMIZER.search(text) else []
    # `accel.compat` implements their names with accel.
    uses_accel = _IMPORTS_ACCEL.search(text) or (alias_env.is_requested(os.environ) and _IMPORTS_HF.search(text))
    return [*names, "accel.accelerator", "safetensors.torch"] if uses_accel else names


def preload(program: Program) -> None:
    """Import the modules that the program will probably import. Missing ones are ignored."""
    for name in modules_for(program):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _source(program: Program) -> bytes:
    path = program.argv[0]
    if program.entry == "module":
        # Only the working directory, where `python -m` looks first: finding an installed module would import its
        # parent packages, which is for the program to do.
        parts = program.argv[0].split(".")
        candidates = [Path(*parts).with_suffix(".py"), Path(*parts, "__main__.py")]
        path = next((str(file) for file in candidates if file.is_file()), "")
    try:
        return Path(path).read_bytes() if path.endswith(".py") else b""
    except OSError:
        return b""


# The server, and the launcher's side of it.

_LEFTOVER_GRACE_S = 2.0
_SWEEP_INTERVAL_S = 0.05
_KILL_NOW = signal.SIGQUIT

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, _KILL_NOW, *WARNINGS)


class ServerGone(Exception):
    """The fork server and its ranks have died."""


class ForkServer:
    """The launcher's handle on its fork server. Not thread-safe."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock = sock
        self._reader = _Lines(sock)
        self._unread_events: list[dict[str, Any]] = []
        self.pid = pid

    @classmethod
    def start(
        cls, program: Program, watchdog_fd: int | None, grace_s: float, job_fds: Sequence[int] = ()
    ) -> ForkServer:
        """Fork the server from this process, which must have the ranks' modules loaded and have no threads."""
        client_sock, server_sock = socket.socketpair()
        adopt_orphans()
        gc.collect()
        gc.freeze()  # a collection in a rank would write to, and so copy, every shared page
        pid = _fork()
        if pid == 0:
            client_sock.close()
            _Server(server_sock, program, watchdog_fd, grace_s, job_fds).serve()
        server_sock.close()
        return cls(client_sock, pid)

    def start_rank(self, local_rank: int, env: dict[str, str], log: str | None, spawn: bool) -> None:
        self._send(do="start", local_rank=local_rank, env=env, log=log, spawn=spawn)

    def end(self, signum: int, grace_s: float) -> None:
        """Request the end of all ranks and their descendants; an `ended` event reports that none is left."""
        self._send(do="end", signal=int(signum), grace=grace_s)

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return new events, waiting up to `timeout_s` for the first. Raises ServerGone."""
        if select.select([self._sock], [], [], 0 if self._unread_events else timeout_s)[0]:
            self._unread_events += self._reader.read()
        events, self._unread_events = self._unread_events, []
        if not events and self._reader.closed:
            raise ServerGone(_death(self.pid))
        return events

    def warn(self, signum: int) -> None:
        """Forward a warning signal to every rank. Safe in a signal handler."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def kill_now(self) -> None:
        """End all ranks without a grace period, or with no more of it. Safe in a signal handler."""
        self.warn(_KILL_NOW)

    def close(self) -> None:
        """Stop and reap the server. Remaining ranks are ended gracefully first."""
        self._sock.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _send(self, **message: object) -> None:
        """Send a message, reading events meanwhile: a server whose events are not read accepts no message either."""
        remaining = json.dumps(message).encode() + b"\n"
        while remaining:
            if select.select([self._sock], [self._sock], [])[0]:
                self._unread_events += self._reader.read()
            try:
                remaining = remaining[self._sock.send(remaining, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError:
                raise ServerGone(_death(self.pid)) from None


def _fork() -> int:
    with warnings.catch_warnings():
        # The warning is about numpy's BLAS threads, which stop before a fork and start again after it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _death(pid: int) -> str:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "the fork server has ended"
    code = os.waitstatus_to_exitcode(status)
    return f"the fork server was killed by {signal_name(-code)}" if code < 0 else f"the fork server exited {code}"


class _Lines:
    """A reader of JSON lines from a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        self.closed = False

    def read(self) -> list[dict[str, Any]]:
        """Read once and return the objects received."""
        try:
            data = self._sock.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.closed = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class _Server:
    """The server's own side. Every method runs in the forked process."""

    def __init__(
        self, sock: socket.socket, program: Program, watchdog_fd: int | None, grace_s: float,
        job_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._sock = sock
        self._lines = _Lines(sock)
        self._program = program
        self._watchdog_fd = watchdog_fd
        self._job_fds = job_fds
        self._grace_s = grace_s
        self._ranks: dict[int, tuple[int, int]] = {}  # pid -> local rank, descriptor of its error file
        self._launcher_lives = True  # it has not closed its end of the socket
        self._launcher_connected = True  # no event has failed to be sent
        self._deadline: float | None = None  # while ending: when to kill
        self._terminated: set[int] = set()  # while ending: leftovers that were sent SIGTERM
        self._wake_read, self._wake_write = wake_pipe()

    def serve(self) -> NoReturn:
        os.setsid()
        adopt_orphans()
        self._install_handlers()
        while self._launcher_lives or self._deadline is not None:
            readable = select.select(self._read_fds(), [], [], self._poll_timeout())[0]
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
            if self._sock in readable:
                self._handle_messages()
            self._collect()
            if self._deadline is not None:
                self._advance_end()
        os._exit(0)

    def _read_fds(self) -> list[Any]:
        return [self._sock, self._wake_read] if self._launcher_lives else [self._wake_read]

    def _install_handlers(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._begin_end(signal.SIGTERM, self._grace_s))
        signal.signal(_KILL_NOW, lambda *_: self._begin_end(signal.SIGTERM, 0))
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the launcher decides what these mean
        for signum in WARNINGS:
            signal.signal(signum, lambda received, _: self._signal_ranks(received))

    def _poll_timeout(self) -> float | None:
        if self._deadline is None:
            return None
        if not self._ranks:
            return _SWEEP_INTERVAL_S
        return max(_SWEEP_INTERVAL_S, min(self._deadline - time.monotonic(), 1.0))

    def _handle_messages(self) -> None:
        messages = self._lines.read()
        for message in messages:
            if message["do"] == "start":
                self._start(message)
            else:
                self._begin_end(message["signal"], message["grace"])
        if self._lines.closed:
            self._launcher_lives = False
            self._begin_end(signal.SIGTERM, self._grace_s)

    def _start(self, message: dict[str, Any]) -> None:
        if self._deadline is not None or not self._launcher_connected:
            self._refuse_start(message, "the launcher is stopping all ranks", -signal.SIGTERM)
            return
        server = os.getpid()
        # Block signals until the rank has its own handlers: with the server's it would end the other ranks.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            error_fd = _error_file()
            pid = _fork()
            if pid:
                self._ranks[pid] = (message["local_rank"], error_fd)
        except OSError as error:
            self._refuse_start(message, f"cannot start a process: {error.strerror}", 1)
            return
        finally:
            if os.getpid() == server:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        if pid == 0:
            self._run_rank(message, server, error_fd)
        if self._watchdog_fd is not None:
            with contextlib.suppress(OSError):  # the gang can run without a watchdog
                os.write(self._watchdog_fd, b"%d\n" % pid)
        self._send_event(event="started", local_rank=message["local_rank"], pid=pid)

    def _refuse_start(self, message: dict[str, Any], reason: str, code: int) -> None:
        error = {"type": "OSError", "message": reason}
        self._send_event(
            event="exited", local_rank=message["local_rank"], pid=0, code=code, time=time.time(), error=error
        )

    def _run_rank(self, message: dict[str, Any], server: int, error_fd: int) -> NoReturn:
        try:
            enter_rank(server, message["log"])
        except OSError as error:  # its log cannot be written
            exit_with_error(error, error_fd)
        self._sock.close()
        rank_fds = [fd for _, fd in self._ranks.values()]
        for fd in (self._wake_read, self._wake_write, self._watchdog_fd, *self._job_fds, *rank_fds):
            if fd is not None:
                os.close(fd)
        run(self._program, message["env"], error_fd, preloaded=not message["spawn"])

    def _signal_ranks(self, signum: int) -> None:
        for pid in list(self._ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _begin_end(self, signum: int, grace_s: float) -> None:
        # Only the ranks are signalled: they may still need their data-loader workers to save a checkpoint.
        deadline = time.monotonic() + grace_s
        if self._deadline is None:
            self._signal_ranks(signum)
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _advance_end(self) -> None:
        now = time.monotonic()
        if not self._ranks:
            leftovers = descendants(os.getpid())
            if not leftovers:
                self._deadline = None
                self._terminated.clear()
                self._send_event(event="ended")
                return
            self._deadline = self._end_leftovers(leftovers, now)
        elif now >= (self._deadline or 0):
            _kill(descendants(os.getpid()), signal.SIGKILL)

    def _end_leftovers(self, leftovers: list[int], now: float) -> float:
        """End the exited ranks' descendants: SIGTERM, a short grace period, SIGKILL. Return the new deadline."""
        deadline = self._deadline or now
        if now >= deadline:
            _kill(leftovers, signal.SIGKILL)
            return deadline
        _kill([pid for pid in leftovers if pid not in self._terminated], signal.SIGTERM)
        self._terminated.update(leftovers)
        return min(deadline, now + _LEFTOVER_GRACE_S)

    def _collect(self) -> None:
        for pid, status in _reap_children():
            if pid not in self._ranks:
                continue  # an orphan of a rank, adopted
            local_rank, error_fd = self._ranks.pop(pid)
            self._send_event(event="exited", local_rank=local_rank, pid=pid, time=time.time(),
                       code=os.waitstatus_to_exitcode(status), error=_read_error(error_fd))  # fmt: skip

    def _send_event(self, **event: object) -> None:
        try:
            self._sock.sendall(json.dumps(event).encode() + b"\n")
        except OSError:  # the launcher is dead; the server ends the gang without it
            self._launcher_connected = False


def _reap_children() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _kill(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _error_file() -> int:
    """Return the descriptor of an unnamed file, in memory if possible, for a rank's exception."""
    if sys.platform == "linux":
        return os.memfd_create(watchdog.memory_file(os.environ[watchdog.LAUNCH_ID]))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read_error(fd: int) -> dict[str, Any] | None:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        data = file.read()
    try:
        return dict(json.loads(data)) if data else None
    except ValueError:  # killed while it wrote
        return None
