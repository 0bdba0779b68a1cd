"""Run a script's function with torch_xla on every core of this TPU host, one process per chip.

`python -m accel.launch.xla script|module FUNCTION NAME [ARGUMENTS]`
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accel.errors import nearest
from schedulers.processes import die_with_parent

# `accel launch` sets these; given TORCHELASTIC_RUN_ID, torch_xla takes this process for a rank and starts none.
_TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
)  # fmt: skip
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str]) -> int:
    """Run the function on every core. Return 0 or the exit code of the first failed process; it ends the others."""
    kind, function, name, *arguments = argv
    problem = _problem(kind, function, name)
    if problem:
        return _print_error(problem)
    for variable in _TORCHRUN_VARIABLES:
        os.environ.pop(variable, None)
    import torch_xla

    received: list[int] = []

    def forward_signal(signum: int, _: object) -> None:
        received.append(signum)
        _signal_all(signum)

    for signum in _FORWARDED:
        signal.signal(signum, forward_signal)
    signal.signal(signal.SIGCHLD, _on_child)
    with tempfile.TemporaryDirectory(prefix="accel-xla-") as folder:
        report = Path(folder, "code")
        try:
            torch_xla.launch(Core(kind, function, name, arguments, str(report)))
        except BrokenProcessPool:
            if report.exists():
                return int(report.read_text() or 1)
            if received:
                return 128 + received[0]
            return _print_error("a process of torch_xla was killed (out of memory?)")
        except (RuntimeError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return _print_error(f"torch_xla cannot start: {lines[0]}")
    return 0


def _on_child(*_: object) -> None:
    """End all processes when one has failed.

    torch_xla's pool does that too, but misses processes started while its thread began to wait (Python 3.9 to
    3.13).
    """
    with contextlib.suppress(ChildProcessError):
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if child is not None and child.si_status != 0:
            _signal_all(signal.SIGTERM)


def _signal_all(signum: int) -> None:
    for process in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signum)


class Core:
    """The work of each core, in a process that imports the script itself."""

    def __init__(self, kind: str, function: str, name: str, arguments: Sequence[str], report: str) -> None:
        self._kind, self._function, self._name, self._arguments = kind, function, name, list(arguments)
        self._report = report
        self._parent = os.getpid()

    def __call__(self, index: int) -> None:
        """Run the function. On failure, exit at once: torch_xla would wait for all others first."""
        die_with_parent(signal.SIGKILL, self._parent)
        os.environ["FORK_LAUNCHED"] = "1"  # as Accelerate's launcher sets it
        try:
            sys.argv = [self._name, *self._arguments]
            module = _load(self._kind, self._name)
            sys.argv[0] = module.__file__ or self._name
            getattr(module, self._function)()
        except SystemExit as end:
            if end.code not in (None, 0):
                self._exit(end.code)
        except BaseException:
            traceback.print_exc()
            self._exit(1)

    def _exit(self, code: Any) -> None:
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        with contextlib.suppress(FileExistsError), open(self._report, "x") as file:
            file.write(str(code & 0xFF))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF)


def _problem(kind: str, function: str, name: str) -> str:
    """Return an error message if the function cannot be called, else "". Does not import the script."""
    if find_spec("torch_xla") is None:
        return f"torch_xla is not installed in {sys.executable}: pip install 'accel-launch[torch-xla]'"
    path = name
    if kind == "module":
        try:
            spec = find_spec(name)
        except ImportError:
            spec = None
        if spec is None:
            return f"module {name!r} not found"
        path = spec.origin or ""
    if not path.endswith(".py"):
        return ""
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except SyntaxError:
        return ""  # the import reports it
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             for alias in node.names}  # fmt: skip
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if function in functions | names or "*" in names:
        return ""
    suggestion = nearest(function, functions)
    return f"{name} has no function {function!r}{suggestion}: pass its name with --main_training_function"


def _load(kind: str, name: str) -> Any:
    if kind == "module":
        return importlib.import_module(name)
    folder, file = os.path.split(os.path.abspath(name))
    sys.path.insert(0, folder)
    return importlib.import_module(os.path.splitext(file)[0])


def _print_error(text: str) -> int:
    print(f"accel launch: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
