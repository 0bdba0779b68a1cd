"""A pool of forked processes that run a function together.

For notebooks, whose functions no other program can import: a forked process already has the function and all
that it refers to. Every process leads its own session: an interrupt of this program does not reach it, and its
descendants are ended with it. On Linux the kernel kills the processes if this program is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from accel.errors import ProcessError
from schedulers.processes import die_with_parent, signal_name

from .failure import Exit, first_failure

_GRACE_S = 5.0
_ECHO_WAIT_S = 0.5
_MAX_CHARACTERS = 5000


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one process: function, arguments, and the variables that differ from this program's."""

    rank: int
    local_rank: int
    env: Mapping[str, str]
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass
class _Running:
    task: Task
    process: ForkProcess
    pipe: Connection
    handle: int  # becomes readable when the process has ended
    exit: Exit | None = None


def run(tasks: Sequence[Task], prepare: Callable[[Task], None], finish: Callable[[], None]) -> None:
    """Run all tasks at the same time and return when all have succeeded.

    Each process calls ``prepare(task)`` before the function and ``finish()`` after it. Raises `ProcessError` with
    the traceback of the process that failed first. All processes and their descendants are ended before any
    error, `KeyboardInterrupt` included, propagates.
    """
    running: list[_Running] = []
    try:
        for task in tasks:
            running.append(_start(task, prepare, finish))
        failed_at = _watch(running)
    except BaseException:
        _end(running)
        raise
    if failed_at is not None:
        _end(running)
        raise _failure(running, failed_at)


def _start(task: Task, prepare: Callable[[Task], None], finish: Callable[[], None]) -> _Running:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, os.getpid(), task, prepare, finish), name=f"rank {task.rank}"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns if there are threads. A notebook's hold no lock that a rank takes.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    # Not the sentinel: that pipe stays open as long as any descendant of the process is alive.
    pid = process.pid or 0
    return _Running(task, process, receiver, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else process.sentinel)


def _child(
    pipe: Connection, parent: int, task: Task, prepare: Callable[[Task], None], finish: Callable[[], None]
) -> None:
    os.setsid()
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(task.env)
    _leave_pool()
    try:
        prepare(task)
        task.function(*task.args)
        finish()
    except SystemExit as end:
        if end.code not in (None, 0):
            _send_error(pipe, end, f"SystemExit: {end.code}")
            sys.exit(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        _send_error(pipe, error, "".join(traceback.format_exception(type(error), error, _user_part(error))))
        sys.exit(1)


def _leave_pool() -> None:
    """Remove the forking thread from its ThreadPoolExecutor's list: at exit it would join itself, an error."""
    pools = sys.modules.get("concurrent.futures.thread")
    getattr(pools, "_threads_queues", {}).pop(threading.current_thread(), None)


def _user_part(error: BaseException) -> Any:
    """Return the traceback without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _send_error(pipe: Connection, error: BaseException, text: str) -> None:
    # The pipe is read only after this process has ended: all of it must fit into the pipe's 64 KiB.
    message, text = str(error)[:_MAX_CHARACTERS], text[-2 * _MAX_CHARACTERS :]
    with contextlib.suppress(OSError):
        pipe.send({"type": type(error).__name__, "message": message, "time": time.time(), "traceback": text})


def _watch(running: Sequence[_Running]) -> float | None:
    """Wait until all processes succeed (None) or one fails; return the time of the failure.

    After an echo, wait up to 0.5 s more for its cause.
    """
    remaining = list(running)
    while remaining:
        ready = wait([child.handle for child in remaining])
        for child in [child for child in remaining if child.handle in ready]:
            remaining.remove(child)
            _record_end(child)
        failed = [child.exit for child in running if child.exit is not None and child.exit.code != 0]
        if failed:
            now = time.time()
            if all(end.echo for end in failed):  # the cause is another process's failure
                deadline = time.monotonic() + _ECHO_WAIT_S
                for child in remaining:
                    if wait([child.handle], max(0.0, deadline - time.monotonic())):
                        _record_end(child)
                now = time.time()
            return now
    return None


def _record_end(child: _Running) -> None:
    error = None
    with contextlib.suppress(EOFError, OSError):
        error = child.pipe.recv() if child.pipe.poll() else None
    pid = child.process.pid or 0
    if _has_failed(pid):
        # Kill its descendants before it is reaped: until then its process group id is not reused.
        _signal_group(pid, signal.SIGKILL)
    child.process.join()
    if child.handle != child.process.sentinel:
        os.close(child.handle)
    code = child.process.exitcode or 0
    child.exit = Exit(rank=child.task.rank, local_rank=child.task.local_rank, pid=pid, code=code, time=time.time(),
                    error=error)  # fmt: skip


def _has_failed(pid: int) -> bool:
    if not hasattr(os, "waitid"):
        return False
    with contextlib.suppress(ChildProcessError):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return status is None or status.si_code != os.CLD_EXITED or status.si_status != 0
    return False


def _end(running: Sequence[_Running]) -> None:
    """End every process and its session: SIGTERM, grace period, SIGKILL. An interrupt cuts the grace period short."""
    remaining = [child for child in running if child.exit is None]
    for child in remaining:
        _signal_group(child.process.pid or 0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(KeyboardInterrupt):
        for child in remaining:
            wait([child.handle], max(0.0, deadline - time.monotonic()))
    for child in remaining:
        _signal_group(child.process.pid or 0, signal.SIGKILL)
        _record_end(child)


def _signal_group(pid: int, signum: int) -> None:
    if pid <= 0:
        return
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):  # it has not called setsid yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _failure(running: Sequence[_Running], failed_at: float) -> ProcessError:
    end = first_failure([child.exit for child in running if child.exit is not None], failed_at)
    error = end.error or {}
    description = f"was killed by {signal_name(-end.code)}" if end.code < 0 else f"ended with exit code {end.code}"
    error_text = f"{error['type']}: {error['message']}" if error else description
    headline = f"process {end.rank} of {len(running)} failed first: {(error_text.splitlines() or [description])[0]}"
    remedy = _remedy(error_text)
    return ProcessError("\n\n".join(filter(None, (headline + remedy, str(error.get("traceback", "")).rstrip()))))


def _remedy(error_text: str) -> str:
    if "forked subprocess" in error_text or "initialization error" in error_text:
        return "; this program has used the GPU before: restart it, and use the GPU inside the function only"
    if "autograd's threading" in error_text:
        return "; this program has computed gradients on a GPU before: restart it, and do so inside the function only"
    return ""
