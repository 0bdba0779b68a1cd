"""End of all processes of a job on this host, even of those whose parents have exited."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

PR_SET_CHILD_SUBREAPER = 36
MARKER = "ACCEL_JOB_ID"  # in the environment of everything that a job starts
_STARTTIME_FIELD = 19  # index among the fields of /proc/PID/stat after the name
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessReaper:
    """Ends all processes of a job on this host but the supervisor: SIGTERM, then SIGKILL until none is left."""

    def __init__(self, job_id: str) -> None:
        self._mark = os.fsencode(f"{MARKER}={job_id}")
        self._started_at: float | None = None
        self._terminated: set[tuple[int, bytes]] = set()

    def done(self, grace_s: float) -> bool:
        """Take the next step, without waiting; return True if no process is left. Call it again until then."""
        processes = self._remaining()
        if not processes:
            self._started_at, self._terminated = None, set()
            return True
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now
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
        return {
            (pid, started)
            for pid, started in start_times.items()
            if pid != own_pid and (_below(pid, own_pid, parents) or self._has_marker(pid))
        }

    def _has_marker(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._mark in file.read().split(b"\0")
        except OSError:
            return False


def _stat(pid: int | str) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _send(pid: int, started: bytes, signum: int) -> None:
    """Signal that process, and no later one with its id."""
    with contextlib.suppress(OSError):  # gone, or a set-user-id program that only root may end
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


def _below(pid: int, top: int, parents: dict[int, int]) -> bool:
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == top:
            return True
    return False


def _collect(pid: int) -> None:
    if pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return
