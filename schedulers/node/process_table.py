"""The processes of this machine, as /proc shows them, and what the kernel does at a process's end."""

from __future__ import annotations

import os
import signal
import sys
from collections import namedtuple

TYPE_CHECKING = False  # typing itself would take as long to import as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The job's id, in the environment of its supervisor and of everything that the job starts.
JOB_MARK = "ACCEL_JOB_ID"
OTHERS_S = 5.0  # for which processes of other users may take to end by themselves
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# A process. `alive`: it is no zombie; `started`: its start time (ids are reused).
Row = namedtuple("Row", ["pid", "parent", "session", "alive", "started"])


def rows() -> Iterator[Row]:
    """Yield all processes (Linux)."""
    for name in os.listdir("/proc"):
        fields = stat(int(name)) if name.isdigit() else None
        if fields is not None:
            yield Row(int(name), int(fields[1]), int(fields[3]), fields[0] not in b"ZX", fields[19])


def stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat (man 5 proc) from the third one, the state; None if there is no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def variable(pid: int, name: str) -> str:
    """Return the variable in the environment that the process was started (by exec) with; "" if it cannot be read."""
    prefix = os.fsencode(f"{name}=")
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = [entry for entry in file.read().split(b"\0") if entry.startswith(prefix)]
    except OSError:
        return ""
    return os.fsdecode(entries[0][len(prefix) :]) if entries else ""


def may_signal(pid: int) -> bool:
    """Return False for a process that only another user may signal."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # a set-user-id program
        return False
    except ProcessLookupError:
        pass
    return True


def others_warning(pids: Iterable[int]) -> str:
    """Return a warning that names these processes of the job, which only another user may end."""
    return f"processes of the job belong to another user and still run: {', '.join(map(str, sorted(pids)))}"


def as_exit_code(returncode: int) -> int:
    """Return the exit code that a shell reports for a child's return code: 128 and its signal's number if killed."""
    return returncode if returncode >= 0 else 128 - returncode


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `signum` to this process when its parent's thread ends (Linux: PR_SET_PDEATHSIG).

    `parent`: the pid of the process that started this one; if it ended before this call, this process exits now.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signum)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux: PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
