"""Python processes forked from an interpreter that has loaded what they need, for tests that start many.

`start` is `subprocess.Popen` for a Python program: a process with its own session, environment, directory, standard
streams and exit. It saves the CPU time that a new interpreter needs for its imports: 1.6 s for torch, 3.1 s with
torch._dynamo, 0.1 s for a command of `accel`. A test whose subject is the start of the interpreter, or what is
imported in it, starts a new one.

A server is started with its first process and ends with the process that started it. It runs no thread and no test.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from accel.launch.worker import exit_without_teardown

ROOT = Path(__file__).parents[1]
MARK = "ACCEL_TEST_MARK"  # a variable of 32 characters by which /proc/PID/environ tells whose process it is
_NO_MARK = "-" * 32

# What a server loads. A command of the first kind costs some milliseconds; one of the second, 20.
COMMANDS = (
    *"submit list status describe logs wait cancel targets prune config completion launch rows stream".split(),
    *"output finding values yaml_edit".split(),
)
LIGHT = (*(f"accel.cli.{name}" for name in COMMANDS), "schedulers.local", "rich.console", "rich.table", "msgspec.json")
TORCH = ("torch._dynamo", "accel.accelerator", "accel.launch.multi_process", "accel.cli.launch", "safetensors.torch")

# Read while the interpreter or a library is loaded: a process with another value needs a new interpreter.
_READ_EARLY = tuple("PYTHON LD_ MKL_ KMP_ OPENBLAS_ MALLOC_ TORCH_ TORCHINDUCTOR_ ACCEL_COMPAT".split())
# Set in os.environ by torch._inductor and sklearn in a process that uses them, not by who starts it.
_SET_BY_LIBRARIES = ("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
_PLAIN_LOCALES = ("", "C", "POSIX", "C.UTF-8")


class Process(Protocol):
    """What `subprocess.Popen` has too."""

    returncode: int | None

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def start(
    argv: Sequence[str | bytes],
    *,
    cwd: Path | None,
    env: Mapping[str, str],
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: IO[bytes],
    stderr: IO[bytes],
    loaded: tuple[str, ...] = TORCH,
) -> Process:
    """Start `argv` in a session of its own: forked where it runs this Python and no variable is read early."""
    if os.fsdecode(argv[0]) != sys.executable or not fits(env):
        return subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    with open(os.devnull, "rb") as null:
        files = [null if isinstance(stdin, int) else stdin, stdout, stderr]
        return _Forked(_server(loaded), argv, cwd or Path.cwd(), env, [file.fileno() for file in files])


def run(
    argv: Sequence[str | bytes], *, cwd: Path | None, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end; return what it printed, as text."""
    done = finish(argv, cwd=cwd, env=env, timeout=timeout, loaded=TORCH)
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(argv, done.returncode, out, err)


def finish(
    argv: Sequence[str | bytes], *, cwd: Path | None, env: Mapping[str, str], timeout: float, loaded: tuple[str, ...]
) -> subprocess.CompletedProcess[bytes]:
    """Run `argv` to its end; return the bytes that it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(argv, cwd=cwd, env=env, stdout=out, stderr=err, loaded=loaded)
        try:
            code = process.wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        printed = [_content(file) for file in (out, err)]
    return subprocess.CompletedProcess(argv, code, *printed)


def fits(env: Mapping[str, str]) -> bool:
    """Return True if the server can fork a process that has this environment."""
    plain = all(env.get(name, "") in _PLAIN_LOCALES for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    known_path = env.get("PYTHONPATH") in (None, str(ROOT))
    return sys.platform == "linux" and plain and known_path and _early(env) == _SERVER_ENV


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _early(env: Mapping[str, str]) -> dict[str, str]:
    ignored = ("PYTHONPATH", *_SET_BY_LIBRARIES)
    return {name: env[name] for name in env if name.startswith(_READ_EARLY) and name not in ignored}


# As it is now: a test may change the variables of this process before the first one that needs the server.
_SERVER_ENV = _early(os.environ)


class _Forked:
    """A child of the server, which reports its end over a socket."""

    def __init__(
        self,
        server: socket.socket,
        argv: Sequence[str | bytes],
        cwd: Path,
        env: Mapping[str, str],
        files: list[int],
    ) -> None:
        self.args = argv
        self.returncode: int | None = None
        what = {"argv": [os.fsdecode(word) for word in argv], "cwd": os.fsdecode(cwd), "env": dict(env)}
        data = json.dumps(what).encode()
        self._reports, theirs = socket.socketpair()
        with theirs:
            rights = array.array("i", [theirs.fileno(), *files])
            server.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._reports.sendall(struct.pack("I", len(data)) + data)
        self.pid = self._number()
        if self.pid < 0:
            raise OSError(-self.pid, os.strerror(-self.pid), str(cwd))

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired([os.fsdecode(word) for word in self.args], timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            self.returncode = self._number()
            self._reports.close()
        return self.returncode

    def _number(self) -> int:
        data = self._reports.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            raise OSError("the fork server of the tests has ended")
        return int(struct.unpack("i", data)[0])


_controls: dict[tuple[int, tuple[str, ...]], socket.socket] = {}  # where each server of a process takes requests
_starting = threading.Lock()  # of two servers that threads start at once, one would end, with the other's place taken


def _server(loaded: tuple[str, ...]) -> socket.socket:
    with _starting:
        key = os.getpid(), loaded
        if key not in _controls:
            ours, theirs = socket.socketpair()
            mine = {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", MARK: _NO_MARK}
            env = (
                {name: os.environ[name] for name in os.environ if not name.startswith(_READ_EARLY)} | _SERVER_ENV | mine
            )
            with theirs:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *loaded],
                    cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            server.returncode = 0  # it ends when `ours` is closed, at the end of this process: nobody waits for it
            _controls[key] = ours
        return _controls[key]


# What follows runs in the server, and in the processes that it forks.


class _Requests:
    """The server: forks a process for each request, and reports its number and its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reports: dict[int, socket.socket] = {}  # by process

    def serve(self) -> dict[str, Any] | None:
        """Return the request in each forked process; None in the server, when there will be no more."""
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable = select.select([self._control.fileno(), woken], [], [])[0]
            if woken in readable:
                os.read(woken, 4096)
                self._report_ends()
            if self._control.fileno() in readable:
                data, fds, _, _ = socket.recv_fds(self._control, 1, 4)
                if not data:
                    self._kill_all()
                    return None
                request = self._fork(socket.socket(fileno=fds[0]), fds[1:])
                if request is not None:
                    os.close(woken)
                    os.close(waker)
                    return request

    def _fork(self, reports: socket.socket, files: list[int]) -> dict[str, Any] | None:
        (size,) = struct.unpack("I", reports.recv(4, socket.MSG_WAITALL))
        request: dict[str, Any] = json.loads(reports.recv(size, socket.MSG_WAITALL))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's BLAS stops its threads before a fork
            pid = os.fork()
        if pid:
            self._reports[pid] = reports
            for fd in files:
                os.close(fd)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(files):
            os.dup2(fd, number)
        for fd in files:
            os.close(fd)
        for open_here in (self._control, *self._reports.values()):
            open_here.close()
        return {**request, "reports": reports}

    def _kill_all(self) -> None:
        """Kill the processes that the tests' process has left: it was killed, or ended by a signal in a test."""
        for pid in self._reports:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _report_ends(self) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._reports.pop(pid) as reports, contextlib.suppress(OSError):  # nobody may wait any more
                reports.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))


def _serve(control: int, modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = _Requests(socket.socket(fileno=control)).serve()
    if request is None:
        return
    with request["reports"] as reports:
        try:
            _enter(request)
        except OSError as error:
            reports.sendall(struct.pack("i", -(error.errno or 1)))
            os._exit(1)
        reports.sendall(struct.pack("i", os.getpid()))
    forked = os.getpid()
    try:
        _become(request["argv"][1:])
        code: object = 0
    except SystemExit as end:
        if os.getpid() != forked:  # a rank that `accel launch` has forked ends as the interpreter ends it
            raise
        code = end.code
    _leave(code)


def _enter(request: Mapping[str, Any]) -> None:
    """Give a forked process what a new one gets from its parent."""
    os.setsid()
    os.chdir(request["cwd"])
    env: dict[str, str] = request["env"]
    os.environ.clear()
    os.environ.update(env)
    if MARK in env:
        _show_mark(env[MARK])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _show_mark(mark: str) -> None:
    """Write the mark where the kernel reads /proc/self/environ: over the server's, which is as long."""
    assert len(mark) == len(_NO_MARK)
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    at = Path("/proc/self/environ").read_bytes().index(f"{MARK}={_NO_MARK}".encode())
    ctypes.memmove(begin + at + len(MARK) + 1, mark.encode(), len(mark))


def _become(words: list[str]) -> None:
    """Run `words` as `python words` does, in a module `__main__` of its own."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
        main.__dict__["__file__"] = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True), main.__dict__)


def _leave(code: object) -> NoReturn:
    """End as the interpreter does, but for its taking modules to pieces: 0.3 s of CPU time with torch loaded."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    exit_without_teardown(code or 0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
