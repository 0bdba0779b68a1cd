"""End of all processes of a job on this host, even of those whose parents have exited."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from ...node import process_table


class ProcessReaper:
    """Ends all processes of a job on this host but the supervisor: SIGTERM, then SIGKILL until none is left.

    `warning` names the processes that only another user may end; these have `OTHERS_S` seconds to end by themselves.
    """

    def __init__(self, job_id: str) -> None:
        self._mark = job_id
        self._started_at: float | None = None
        self._terminated: set[tuple[int, bytes]] = set()
        self.warning = ""

    def done(self, grace_s: float) -> bool:
        """Take the next step, without waiting; return True if no process is left. Call it again until then."""
        processes = self._remaining()
        others = {process for process in processes if not process_table.may_signal(process[0])}
        processes -= others
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now
        if not processes and (not others or now - self._started_at >= process_table.OTHERS_S):
            self.warning = process_table.others_warning(pid for pid, _ in others) if others else ""
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
        rows = {row.pid: row for row in process_table.rows()}
        for row in rows.values():
            if not row.alive and row.parent == own_pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(row.pid, os.WNOHANG)
        alive = [row for row in rows.values() if row.alive]
        marks = {row.pid: process_table.variable(row.pid, process_table.JOB_MARK) for row in alive}
        own = [row for row in alive if row.pid != own_pid and self._is_ours(row.pid, own_pid, rows, marks)]
        return {(row.pid, row.started) for row in own}

    def _is_ours(self, pid: int, own_pid: int, rows: dict[int, process_table.Row], marks: dict[int, str]) -> bool:
        """Return True for a process with the job's mark, or with no readable mark below one of the job."""
        seen: set[int] = set()
        while pid != own_pid:
            mark = marks.get(pid, "")  # a process that has ended has none
            if mark or pid in seen or pid not in rows:
                return mark == self._mark
            seen.add(pid)
            pid = rows[pid].parent
        return True


def _send(pid: int, started: bytes, signum: int) -> None:
    """Signal that process, and no later one with its id."""
    with contextlib.suppress(OSError):  # gone
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None  # Python 3.8 has none
        try:
            fields = process_table.stat(pid)
            if fields is None or fields[19] != started:
                return
            if pidfd is None:
                os.kill(pid, signum)
            else:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            if pidfd is not None:
                os.close(pidfd)
