"""Run the user's program in a forked rank, report its error, and exit fast with the requeue code."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import random
import runpy
import signal
import stat
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

from accel.exit_codes import REQUEUE
from schedulers.processes import die_with_parent

from . import alias_env

_RESET = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of every rank: `argv[0]` is a script, a module (`-m`) or a non-Python command."""

    argv: list[str]
    entry: Literal["script", "module", "command"]

    @classmethod
    def parse(cls, argv: list[str], *, module: bool, command: bool) -> Program:
        """Return the program for a command line's words, `-m` and `--no_python`."""
        return cls(argv=argv, entry="module" if module else "command" if command else "script")

    def command(self, *, unbuffered: bool = True) -> list[str]:
        """Return the program as a command line."""
        python = [sys.executable, "-u"] if unbuffered else [sys.executable]
        return {"script": [*python, *self.argv], "module": [*python, "-m", *self.argv], "command": self.argv}[
            self.entry
        ]


def ignore_warnings() -> None:
    """Ignore warning signals, whose default action would kill a program without a handler."""
    for signum in WARNINGS:
        signal.signal(signum, signal.SIG_IGN)


def enter_rank(server_pid: int, log: str | None) -> None:
    """Make a freshly forked process a rank: a session of its own, bound to its parent's life, default signals."""
    os.setsid()
    die_with_parent(signal.SIGKILL, server_pid)
    signal.set_wakeup_fd(-1)
    for signum in _RESET:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as the interpreter sets it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ignore_warnings()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    redirect(log)


def redirect(log: str | None) -> None:
    """Read stdin from /dev/null, and write stdout and stderr directly to the log file, if any."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log is None:
        return
    file = open_log(log)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def open_log(path: str, access: int = os.O_WRONLY) -> int:
    """Open a file for appending, with the read and write permissions of its directory."""
    mode = os.stat(os.path.dirname(path) or ".").st_mode & 0o066 | 0o600
    return os.open(path, access | os.O_CREAT | os.O_APPEND, mode)


def run(program: Program, env: dict[str, str], error_fd: int, preloaded: bool) -> NoReturn:
    """Become the user's program and end as the interpreter would. Never returns."""
    os.environ.update(env)
    if program.entry == "command" or not preloaded:
        _exec(program.command())
    _set_error_file(error_fd)
    _fresh_interpreter_state()
    if alias_env.is_requested(os.environ):
        import accel.compat  # noqa: F401
    faulthandler.enable(file=2)  # prints the stack on SIGSEGV
    try:
        run_main(program)
    except SystemExit as end:
        if isinstance(end.code, str):  # sys.exit("message"): the interpreter prints it, and the report repeats it
            _write_error(end, "")
        if end.code == REQUEUE:
            exit_without_teardown(REQUEUE)
        raise
    except BaseException as error:
        _report(error)
    raise SystemExit(0)


def exit_with_error(error: Exception, error_fd: int) -> NoReturn:
    _set_error_file(error_fd)
    _write_error(error, "")
    os._exit(1)


def exec_command(command: list[str]) -> NoReturn:
    """Replace this process by `command`. Raises OSError."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command must not
        signal.signal(signum, signal.SIG_DFL)
    os.execvp(command[0], command)


def _exec(command: list[str]) -> NoReturn:
    try:
        exec_command(command)
    except OSError as error:
        os.write(2, f"accel launch: cannot run {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


_keep_alive: list[object] = []


def _fresh_interpreter_state() -> None:
    """Renew the state that a forked interpreter shares with its siblings: standard streams and random seeds."""
    # New files have no half-written output of the parent. They are line-buffered: lines of several ranks do not mix,
    # and a killed rank loses at most one.
    _keep_alive.extend((sys.stdin, sys.stdout, sys.stderr))  # a collected one would close the descriptor
    encoding, errors = (sys.stdin.encoding, sys.stdin.errors) if sys.stdin else ("utf-8", "strict")
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            open(fd, "wb", closefd=False),  # noqa: SIM115  # the stream lives as long as the process
            encoding=encoding,
            errors="backslashreplace" if name == "stderr" else errors,
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    stdin = open(0, closefd=False, encoding=encoding, errors=errors)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    # Else every rank would draw the same random numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def run_main(program: Program) -> None:
    """Run a script or a module as `__main__`, as `python script` and `python -m module` do."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv = list(program.argv)
    sys.orig_argv = program.command()
    # The launcher's `schedulers` must not shadow a package of that name next to the user's script.
    for name in [name for name in sys.modules if name.partition(".")[0] == "schedulers"]:
        del sys.modules[name]
    safe_path = getattr(sys.flags, "safe_path", False)
    if program.entry == "module":
        if not safe_path:
            sys.path[0] = os.getcwd()
        runpy._run_module_as_main(program.argv[0])  # type: ignore[attr-defined]
        return
    path = program.argv[0]
    if not safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    code, names = _load(path)
    main.__dict__.update(names)
    exec(code, main.__dict__)


def _load(path: str) -> tuple[types.CodeType, dict[str, Any]]:
    if os.path.isdir(path) or not path.endswith((".py", ".pyw")):
        # A directory, zip file or byte code.
        source = f"import runpy; globals().update(runpy.run_path({path!r}, run_name='__main__'))"
        return compile(source, path, "exec"), {}
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(path)  # the interpreter makes `__file__` absolute; `sys.argv[0]` stays as it was given
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    return code, {"__file__": path, "__loader__": loader, "__cached__": None}


def _report(error: BaseException) -> NoReturn:
    """Report the error that ended this rank to the launcher, then handle it as the interpreter would."""
    user_frames = _user_frames(error)
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _write_error(error, "".join(traceback.format_exception(type(error), error, user_frames)), code)
    # As the interpreter does before its hook: exit handlers read these.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, user_frames
    sys.excepthook(type(error), error.with_traceback(user_frames), user_frames)
    # Not by the signal itself: exit handlers must run, and files be flushed.
    raise SystemExit(code)


_error_file: tuple[int, int] | None = None  # the descriptor, and its inode when this rank began


def _set_error_file(descriptor: int) -> None:
    global _error_file
    _error_file = descriptor, os.fstat(descriptor).st_ino


def _write_error(error: BaseException, trace: str, code: int = 1) -> None:
    """Write the error and this rank's coming exit code for the launcher."""
    try:
        message = str(error)
    except Exception:  # a class of the program
        message = "<its __str__ failed>"
    report = {
        "time": time.time(),
        "type": type(error).__name__,
        "message": message[:4000],
        "traceback": trace[-8000:],
        "code": code,
    }
    with contextlib.suppress(OSError):
        assert _error_file is not None
        descriptor, inode = _error_file
        if os.fstat(descriptor).st_ino == inode:  # the program may have closed and reused it
            os.write(descriptor, json.dumps(report).encode())


def _user_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the launcher's frames at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames  # None for a script that could not be read or compiled


# The exit of a rank that will be restarted.


def exit_without_teardown(code: int) -> NoReturn:
    """Exit as multiprocessing's forked processes do: join threads, run exit handlers, flush open files.

    Skips the teardown of modules, which costs each rank 0.3 s with torch loaded.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_files()
    finally:
        os._exit(code)


def _flush_files() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    for file in objects:
        if type(file) in kinds:
            with contextlib.suppress(Exception):  # closed, a full disk, or a class of the program's own
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a full pipe could block for ever
                    file.flush()
    ctypes.CDLL(None).fflush(None)
