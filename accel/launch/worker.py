"""What one rank does between the fork and the first line of the user's program."""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

from schedulers.processes import die_with_parent

_RESET = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Program:
    """What every rank runs: `argv[0]` is a script, a module (`-m`) or a command that is not Python."""

    argv: list[str]
    entry: Literal["script", "module", "command"]

    def command(self, *, unbuffered: bool = True) -> list[str]:
        """The same, as a command line of its own."""
        python = [sys.executable, "-u"] if unbuffered else [sys.executable]
        return {"script": [*python, *self.argv], "module": [*python, "-m", *self.argv], "command": self.argv}[self.entry]


def ignore_warnings() -> None:
    """A warning signal must not kill a program that has no handler for it (the default action of both would)."""
    for signum in WARNINGS:
        signal.signal(signum, signal.SIG_IGN)


def enter_rank(server_pid: int, log: str | None) -> None:
    """Makes a freshly forked process a rank: a session of its own, bound to its parent's life, default signals."""
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
    """Standard input from nowhere; output straight into the log file, so that its bytes pass through no other hands."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log is None:
        return
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def run(program: Program, env: dict[str, str], error_fd: int, preloaded: bool) -> NoReturn:
    """Becomes the user's program. Ends with it, as the interpreter would have ended it; never returns."""
    os.environ.update(env)
    if program.entry == "command" or not preloaded:
        _exec(program.command())
    _fresh_interpreter_state()
    faulthandler.enable(file=2)  # a rank that dies of SIGSEGV says where
    try:
        _run_main(program)
    except SystemExit as end:
        if isinstance(end.code, str):  # sys.exit("why"): the interpreter prints it, and the report repeats it
            _tell(end, "", error_fd)
        raise
    except BaseException as error:
        _report(error, error_fd)
    raise SystemExit(0)


def _exec(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"accel launch: cannot run {command[0]!r}: {error.strerror}\n".encode())
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _fresh_interpreter_state() -> None:
    """What a new interpreter has of its own and a forked one shares with its sisters."""
    # A new file over the descriptor holds nothing half-written by the parent. Line by line, so that the lines of
    # several ranks on one terminal stay whole, and a rank that is killed has lost at most the one it was writing.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name, None)
        stream = io.TextIOWrapper(
            open(fd, "wb", closefd=False),  # noqa: SIM115  # the stream lives as long as the process
            encoding=getattr(old, "encoding", None) or "utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else every rank would draw the same "random" numbers


def _run_main(program: Program) -> None:
    """Runs the program as `__main__`, as `python script` and `python -m module` do."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv = list(program.argv)
    sys.orig_argv = program.command()
    # The launcher's own imports must not stand in for a package of the same name beside the user's script.
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
        # Directories, zip files and byte code: rare, and runpy knows them all.
        return compile(f"import runpy; globals().update(runpy.run_path({path!r}, run_name='__main__'))", path, "exec"), {}
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    return code, {"__file__": path, "__loader__": loader, "__cached__": None}


def _report(error: BaseException, error_fd: int) -> NoReturn:
    """Tells the launcher what ended this rank, then does what the interpreter does with an uncaught exception."""
    user_frames = _user_frames(error)
    _tell(error, "".join(traceback.format_exception(type(error), error, user_frames)), error_fd)
    sys.excepthook(type(error), error.with_traceback(user_frames), user_frames)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)


def _tell(error: BaseException, trace: str, error_fd: int) -> None:
    said = {"time": time.time(), "type": type(error).__name__, "message": str(error)[:4000], "traceback": trace[-8000:]}
    os.write(error_fd, json.dumps(said).encode())


def _user_frames(error: BaseException) -> TracebackType | None:
    """The traceback without this launcher's frames at its top: the program did not call them."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    # All ours: a script that could not be read or compiled. The last frames say nothing that the message does not.
    return frames
