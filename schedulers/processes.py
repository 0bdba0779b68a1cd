"""Identities of processes that survive the reuse of pids, and termination of many processes. Used on a node."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .node import process_table
from .node.process_table import JOB_MARK as JOB_MARK
from .node.process_table import OTHERS_S, Row, may_signal, others_warning
from .node.process_table import adopt_orphans as adopt_orphans
from .node.process_table import as_exit_code as as_exit_code
from .node.process_table import die_with_parent as die_with_parent

_POLL_S = 0.02


def signal_name(number: int) -> str:
    """Return the name of a signal; `signal 40` for one without a name, such as a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def pid_space() -> str:
    """Return the scope in which pids are unique: this boot of this machine, and this PID namespace of it."""
    return space_of(boot_id(), os.uname().nodename, pid_namespace())


def space_of(boot: str, node: str, namespace: str) -> str:
    """Return the `pid_space` of a recorded process. The node's name stands for a boot without an id (macOS)."""
    return f"{boot or node} {namespace}"


def has_ended(pid: int, space: str) -> bool:
    """Return True if the process has certainly ended; False also for one that is not visible from here."""
    return space == pid_space() and not _exists(pid)


def boot_id() -> str:
    """Return the kernel's id of this boot; empty if the system has none."""
    try:
        return _boot() if sys.platform == "linux" else ""
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the id of this process's PID namespace; empty if the system has none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino) if sys.platform == "linux" else ""
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


@dataclass(frozen=True)
class Identity:
    """The identity of a process, distinct from later processes with its pid and from those of other boots.

    namespace: its PID namespace; empty for the reader's own.
    """

    pid: int
    started: str
    namespace: str = ""

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Return the identity of a live process, or None if there is none (a zombie has ended)."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Parse the text of an identity."""
        pid, _, started = text.partition(" ")
        return cls(int(pid), started)

    def __str__(self) -> str:
        return f"{self.pid} {self.started}"

    def same_boot(self) -> bool:
        """Return True if the process was started on this boot of this machine (always, where boots have no id)."""
        return sys.platform != "linux" or self.started.rpartition(".")[0] == boot_id()

    def alive(self) -> bool:
        """Return True while the process lives and can be seen from here."""
        return self.namespace in ("", pid_namespace()) and _started(self.pid) == self.started

    def send(self, signum: int) -> bool:
        """Signal the process. Return False if it has ended, or is not visible. Never signals another process."""
        with self._opened() as (alive, fd):
            if not alive:
                return False
            try:
                if sys.platform == "linux" and fd is not None:
                    signal.pidfd_send_signal(fd, signum)
                else:
                    os.kill(self.pid, signum)
            except ProcessLookupError:
                return False
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process, which need not be a child, to end. Return True if it has ended."""
        deadline = time.monotonic() + timeout_s
        with self._opened() as (alive, fd):
            if fd is not None:
                return bool(select.select([fd], [], [], timeout_s)[0])
            while alive and self.alive():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
            return True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[bool, int | None]]:
        """Yield True if the process lives, and on Linux a pidfd that provably belongs to it."""
        fd = None
        try:
            if sys.platform == "linux" and self.alive():
                with contextlib.suppress(OSError):
                    fd = os.pidfd_open(self.pid)
            # Checked after opening: from here on the pidfd belongs to this process, even if the pid is reused.
            alive = self.alive() and (fd is not None or sys.platform != "linux")
            yield alive, fd if alive else None
        finally:
            if fd is not None:
                os.close(fd)


def _started(pid: int) -> str | None:
    if sys.platform == "linux":
        fields = process_table.stat(pid)
        return None if fields is None or fields[0] in b"ZX" else f"{_boot()}.{fields[19].decode()}"
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs one of this project's modules from where the project was imported.

    Neither the working directory nor the environment affects which file runs, and neither is changed for it.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = f"import sys; sys.path[:1] = [{root!r}]; import runpy; "
    run = f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code + run, *arguments]


def wake_pipe() -> tuple[int, int]:
    """Return a pipe for `signal.set_wakeup_fd` and `select`. Both ends are non-blocking and closed on exec."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def descendants(pid: int, *, endable: bool = True) -> list[int]:
    """Return the live processes of this job below `pid`, without `pid` itself.

    A process with another job's mark, such as the supervisor of a job that this one submitted, is not of this job, nor
    is what is below it; one without a readable mark (`env -i`, sudo) is. Processes that only another user may signal
    are returned instead with `endable` off.
    """
    children: dict[int, list[Row]] = {}
    for row in _table():
        children.setdefault(row.parent, []).append(row)
    own_marks = ("", os.environ.get(JOB_MARK, ""))
    descendant_pids: list[int] = []
    pending = [pid]
    while pending:
        for row in children.get(pending.pop(), ()):
            if not row.alive:
                pending.append(row.pid)
            elif _variable(row.pid, JOB_MARK) in own_marks:
                pending.append(row.pid)
                if may_signal(row.pid) is endable:
                    descendant_pids.append(row.pid)
    return descendant_pids


def not_ended(pid: int) -> str:
    """Return a warning that names the processes of this job below `pid` which only another user may end; else ''.

    They have `OTHERS_S` seconds to end by themselves.
    """
    deadline = time.monotonic() + OTHERS_S
    while others := descendants(pid, endable=False):
        if time.monotonic() >= deadline:
            return others_warning(others)
        time.sleep(_POLL_S)
        _collect_children()
    return ""


def in_sessions(sessions: Iterable[int]) -> list[int]:
    """Return every live process of these sessions. A session outlives its leader, and its id is not reused."""
    session_ids = set(sessions)
    return [row.pid for row in _table() if row.alive and row.session in session_ids] if session_ids else []


def with_variable(name: str, value: str) -> list[int]:
    """Return every live process that was started (by exec) with `name=value` in its environment."""
    return [row.pid for row in _table() if row.alive and _variable(row.pid, name) == value]


def with_memory_file(name: str) -> list[int]:
    """Return every live process that has an open memfd of this name, perhaps inherited by fork (Linux only)."""
    target = f"/memfd:{name} (deleted)"
    return [row.pid for row in _table() if row.alive and target in _open_files(row.pid)]


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return
    for descriptor in descriptors:
        try:
            yield os.readlink(f"{folder}/{descriptor}")
        except OSError:
            continue


def end_all(find_pids: Callable[[], Iterable[int]], *, grace_s: float) -> None:
    """Send SIGTERM to all pids that `find_pids` returns, wait `grace_s` seconds, then send SIGKILL until none remains.

    `find_pids` must not return processes that only another user may signal.
    Reaps this process's ended children, adopted ones included: read their exit codes before.
    """
    deadline = time.monotonic() + grace_s
    signalled: set[int] = set()
    while live_pids := set(find_pids()):
        grace_over = time.monotonic() >= deadline
        for pid in live_pids if grace_over else live_pids - signalled:
            # Gone, or a set-user-id program that only root may end.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if grace_over else signal.SIGTERM)
        signalled |= live_pids
        time.sleep(_POLL_S)
        _collect_children()


def _collect_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _table() -> Iterator[Row]:
    return process_table.rows() if sys.platform == "linux" else _table_by_psutil()


def _table_by_psutil() -> Iterator[Row]:
    import psutil

    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            yield Row(process.pid, process.ppid(), os.getsid(process.pid), alive, b"")
        except (psutil.Error, OSError):
            continue


def _variable(pid: int, name: str) -> str:
    if sys.platform != "linux":
        import psutil

        try:
            return str(psutil.Process(pid).environ().get(name, ""))
        except (psutil.Error, OSError):
            return ""
    return process_table.variable(pid, name)
