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

# The job's id, in the environment of its supervisor and of everything that the job starts.
JOB_MARK = "ACCEL_JOB_ID"

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_POLL_S = 0.02
_OTHERS_S = 5.0  # for which processes of other users may take to end by themselves


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
        fields = _stat(pid)
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


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `signum` to this process when its parent's thread ends (Linux: PR_SET_PDEATHSIG).

    `parent`: the pid of the process that started this one; if it ended before this call, this process exits now.
    """
    _prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signum)


def wake_pipe() -> tuple[int, int]:
    """Return a pipe for `signal.set_wakeup_fd` and `select`. Both ends are non-blocking and closed on exec."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux: PR_SET_CHILD_SUBREAPER)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def descendants(pid: int, *, endable: bool = True) -> list[int]:
    """Return the live processes of this job below `pid`, without `pid` itself.

    A process with another job's mark, such as the supervisor of a job that this one submitted, is not of this job, nor
    is what is below it; one without a readable mark (`env -i`, sudo) is. Processes that only another user may signal
    are returned instead with `endable` off.
    """
    children: dict[int, list[_Row]] = {}
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
                if _may_signal(row.pid) is endable:
                    descendant_pids.append(row.pid)
    return descendant_pids


def not_ended(pid: int) -> str:
    """Return a warning that names the processes of this job below `pid` which only another user may end; else ''.

    They have `_OTHERS_S` seconds to end by themselves.
    """
    deadline = time.monotonic() + _OTHERS_S
    while others := descendants(pid, endable=False):
        if time.monotonic() >= deadline:
            numbers = ", ".join(map(str, sorted(others)))
            return f"processes of the job still run that only another user may end: {numbers}"
        time.sleep(_POLL_S)
        _collect_children()
    return ""


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # a set-user-id program
        return False
    except ProcessLookupError:
        pass
    return True


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


@dataclass(frozen=True)
class _Row:
    """One line of the system's process table."""

    pid: int
    parent: int
    session: int
    alive: bool


def _table() -> Iterator[_Row]:
    if sys.platform != "linux":
        yield from _table_by_psutil()
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields is not None:
                yield _Row(int(name), int(fields[1]), int(fields[3]), fields[0] not in b"ZX")


def _table_by_psutil() -> Iterator[_Row]:
    import psutil

    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            yield _Row(process.pid, process.ppid(), os.getsid(process.pid), alive)
        except (psutil.Error, OSError):
            continue


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat (man 5 proc) from the third one, the state."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _variable(pid: int, name: str) -> str:
    """Return the variable in the environment that the process was started (by exec) with; "" if it cannot be read."""
    if sys.platform != "linux":
        import psutil

        try:
            return str(psutil.Process(pid).environ().get(name, ""))
        except (psutil.Error, OSError):
            return ""
    prefix = os.fsencode(f"{name}=")
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = [entry for entry in file.read().split(b"\0") if entry.startswith(prefix)]
    except OSError:
        return ""
    return os.fsdecode(entries[0][len(prefix) :]) if entries else ""
