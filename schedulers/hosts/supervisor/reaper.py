"""End of all processes of a job on this host, even of those whose parents have exited."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

PR_SET_CHILD_SUBREAPER = 36
MARKER = "ACCEL_JOB_ID"  # in the environment of everything that a job starts
OTHERS_S = 5.0
_STARTTIME_FIELD = 19  # index among the fields of /proc/PID/stat after the name
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessReaper:
    """Ends all processes of a job on this host but the supervisor: SIGTERM, then SIGKILL until none is left.

    `warning` names the processes that only another user may end; these have `OTHERS_S` seconds to end by themselves.
    """

    def __init__(self, job_id: str) -> None:
        self._mark = os.fsencode(job_id)
        self._started_at: float | None = None
        self._terminated: set[tuple[int, bytes]] = set()
        self.warning = ""

    def done(self, grace_s: float) -> bool:
        """Take the next step, without waiting; return True if no process is left. Call it again until then."""
        processes = self._remaining()
        others = {process for process in processes if not _may_signal(process[0])}
        processes -= others
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now
        if not processes and (not others or now - self._started_at >= OTHERS_S):
            numbers = ", ".join(str(pid) for pid, _ in sorted(others))
            self.warning = f"processes of the job still run that only another user may end: {numbers}" if others else ""
            self._started_at, self._terminated = None, set()
            return True
        grace_over = now - self._started_at >= grace_s
        for pid, started in processes if grace_over else processes - self._terminated:
            _send(pid, started, signal.SIGKILL if grace_over else signal.SIGTERM)
        self._terminated |= processes
        return False

    def _remaining(self) -> set[tuple[int, bytes]]:
        """Return process ids, each with its start time: ids are reused."""
        own_pid = os.getpid()
        parents: dict[int, int] = {}
        start_times: dict[int, bytes] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                fields = _stat(name)
            except OSError:
                continue
            pid = int(name)
            parents[pid] = int(fields[1])
            if fields[0] in b"ZX":
                _collect(pid if parents[pid] == own_pid else 0)
            else:
                start_times[pid] = fields[_STARTTIME_FIELD]
        marks = {pid: _mark_of(pid) for pid in start_times}
        return {
            (pid, started)
            for pid, started in start_times.items()
            if pid != own_pid and self._is_ours(pid, own_pid, parents, marks)
        }

    def _is_ours(self, pid: int, own_pid: int, parents: dict[int, int], marks: dict[int, bytes]) -> bool:
        """Return True for a process with the job's mark, or with no readable mark below one of the job."""
        seen: set[int] = set()
        while pid != own_pid:
            mark = marks.get(pid, b"")  # a process that has ended has none
            if mark or pid in seen or pid not in parents:
                return mark == self._mark
            seen.add(pid)
            pid = parents[pid]
        return True


def _stat(pid: int | str) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _send(pid: int, started: bytes, signum: int) -> None:
    """Signal that process, and no later one with its id."""
    with contextlib.suppress(OSError):  # gone
        if not hasattr(os, "pidfd_open"):  # Python 3.8
            if _stat(pid)[_STARTTIME_FIELD] == started:
                os.kill(pid, signum)
            return
        pidfd = os.pidfd_open(pid)
        try:
            if _stat(pid)[_STARTTIME_FIELD] == started:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def _mark_of(pid: int) -> bytes:
    """Return the job id in the environment that the process was started with; empty if it cannot be read."""
    prefix = MARKER.encode() + b"="
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return next((entry[len(prefix) :] for entry in file.read().split(b"\0") if entry.startswith(prefix)), b"")
    except OSError:
        return b""


def _may_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # a set-user-id program
        return False
    except ProcessLookupError:
        pass
    return True


def _collect(pid: int) -> None:
    if pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return
