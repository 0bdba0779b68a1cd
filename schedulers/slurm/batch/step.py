"""The job's one step: srun with a launcher on each node, and what is collected until it ends."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time

from ...node import logs
from ...node.process_table import as_exit_code
from . import shared_files, slurm
from .outcome import Observations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Document = dict[str, Any]

_LOOK_S = 0.25
_ENDING = ("warned", "terminated", "first report")  # after which the end is near
_FAST_POLL_S = 0.05
_FAST_POLL_FOR_S = 20.0
_GLANCE_S = 1.0
_ALLOWANCE_S = 20.0  # beyond the grace, for a node to report
_REPORTED_S = 10.0  # for srun to end once all nodes have
_START_ALLOWANCE_S = 5.0
_KILL_S = 5.0
_MAX_MESSAGE = 500
_MAX_HELD = 4096
_ERROR = "srun: error: "
_MARK = re.compile(r"(\d+)\.(begun|warned|json)\Z")
# By default, a warning signal would end the shell, and the interpreter while it starts.
_IGNORE_WARNINGS = ["/bin/sh", "-c", 'trap "" USR1 USR2 URG; exec "$@"', "sh"]


def _name_pickle(folder: str, env: dict[str, str]) -> None:
    """Link submitit's pickle under the job number that submitit expects, if the submit was killed before it did."""
    task = env.get("SLURM_ARRAY_TASK_ID")
    number = env["SLURM_JOB_ID"] if task is None else env["SLURM_ARRAY_JOB_ID"] + "_" + task
    pickle_name = "job.pkl" if task is None else f"job_{task}.pkl"
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(os.path.join(folder, pickle_name), os.path.join(folder, number + "_submitted.pkl"))


class Step:
    """The step: call `run`, then `finish`. Fills in `observations`. `clock.full`: the logs' disk was full."""

    def __init__(
        self,
        directory: str,
        env: dict[str, str],
        observations: Observations,
        terminating: Callable[[], bool],
    ) -> None:
        self._settings, self._directory, self._env = observations.settings, directory, env
        self._attempt = observations.attempt
        self._observations, self._is_terminated = observations, terminating
        self._nodes = os.path.join(directory, "slurm", "nodes", f"a{self._attempt}")
        self._logs = os.path.join(directory, "logs")
        self.clock = logs.Clock(self._logs)
        self._since: dict[str, float] = {}
        self._next_listing = self._next_glance = self._next_note = 0.0
        self._kill_at: float | None = None

    def run(self) -> None:
        """Run srun until the ranks' results are known. Raises slurm.Problem if srun cannot be started."""
        os.makedirs(self._nodes, exist_ok=True)
        os.makedirs(self._logs, exist_ok=True)
        argv = [*self._settings["srun"], *_IGNORE_WARNINGS, *self._settings["submitit"]]
        _name_pickle(self._settings["submitit"][-1], self._env)
        self._woken, waker = os.pipe()
        for descriptor in (self._woken, waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            self._srun = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=self._env, cwd=self._directory
            )
        except OSError as error:
            raise slurm.Problem(f"cannot run {argv[0]}: {error.strerror}") from None
        assert self._srun.stderr is not None
        self._srun_output = _SrunOutput(self._srun.stderr.fileno())
        self._mark("start")
        self._watch(self._restart_requested)
        if self._srun.returncode is not None:
            self._record_end()

    def finish(self) -> None:
        """Wait for the end of srun: nodes still have work after their reports."""
        self._watch(lambda: False)

    def _watch(self, finished: Callable[[], bool]) -> None:
        while self._srun.poll() is None and not finished():
            ready = select.select([self._woken, *self._srun_output.readable_fds()], [], [], self._pause_s)[0]
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._srun_output.read()
            self._check_files()
            self._end_when_due()

    def _restart_requested(self) -> bool:
        """Return True if all nodes have reported and request a restart: that need not wait for srun."""
        reports = self._observations.reports
        return all(rank in reports and reports[rank].get("preempted") for rank in self._observations.node_ranks)

    @property
    def _pause_s(self) -> float:
        now = time.monotonic()
        recent = [event for event in _ENDING if event in self._since and now - self._since[event] < _FAST_POLL_FOR_S]
        return _FAST_POLL_S if recent else _LOOK_S

    def _record_end(self) -> None:
        self._srun_output.read()
        self._check_files(now=True)
        code = self._srun.returncode
        self._observations.srun = as_exit_code(code)
        if self._observations.srun and len(self._observations.reports) < self._settings["nodes"]:
            self._observations.last_message = (
                self._last_error() or self._srun_output.complaint or self._srun_output.first
            )

    def _check_files(self, now: bool = False) -> None:
        """Read new files in the job's directory, each kind at its own interval."""
        clock = time.monotonic()
        if self._is_terminated():
            self._mark("terminated")
        if now or clock >= self._next_listing:
            self._read_nodes()
            self._next_listing = clock + self._pause_s
        if now or clock >= self._next_glance:
            self._next_glance = clock + _GLANCE_S
            if shared_files.exists(self._job_file("cancel")):
                self._mark("cancel")
            if shared_files.fenced(self._job_file("attempt"), self._attempt):
                self._mark("fence")
        if now or clock >= self._next_note:
            self.clock.note()
            # Each log, of hundreds perhaps, costs a request to the file server.
            self._next_note = clock + _GLANCE_S + len(self.clock.sizes) / 100

    def _read_nodes(self) -> None:
        for name in logs.entries(self._nodes):
            match = _MARK.match(name)
            if match is None:
                continue
            rank = int(match.group(1))
            self._observations.started_ranks.add(rank)
            if match.group(2) == "warned":
                self._mark("warned")
            if match.group(2) == "json" and rank not in self._observations.reports:
                report = shared_files.read(os.path.join(self._nodes, name))
                if isinstance(report, dict):
                    self._observations.reports[rank] = report
                    self._mark("first report")

    def _job_file(self, name: str) -> str:
        return os.path.join(self._directory, "slurm", name)

    def _end_when_due(self) -> None:
        """End the step once it will not end by itself."""
        now = time.monotonic()
        if self._kill_at is None:
            if not self._is_due(now):
                return
            self._srun.terminate()  # Slurm then kills the step on all nodes
            self._kill_at = now + _KILL_S
        elif now >= self._kill_at:
            self._srun.kill()

    def _is_due(self, now: float) -> bool:
        settings, observations = self._settings, self._observations
        if "fence" in self._since:
            return True
        timeout_s = float(settings["grace_s"]) + _ALLOWANCE_S
        missing = observations.missing_ranks
        if not missing:
            self._mark("all reported")
            return now - self._since["all reported"] >= _REPORTED_S
        idle = [rank for rank in missing if rank not in observations.started_ranks]
        start = float(settings["start_timeout_s"])
        if idle and now - self._since["start"] >= start + _START_ALLOWANCE_S:
            names = ", ".join(observations.name(rank) for rank in idle)
            message = f"{names} did not start within {start:g} s"
            observations.overdue = {"reason": "rendezvous", "message": message}
            return True
        for cause in ("cancel", "terminated", "first report"):
            if cause in self._since and now - self._since[cause] >= timeout_s:
                names = ", ".join(observations.name(rank) for rank in missing)
                message = f"{names} has not reported for {timeout_s:.0f} s"
                observations.overdue = {"reason": "node_failure", "message": message}
                return True
        return False

    def _mark(self, event: str) -> None:
        self._since.setdefault(event, time.monotonic())

    def _last_error(self) -> str:
        """Return the last line of the first node that ended without a report: a missing interpreter or package."""
        paths = (os.path.join(self._logs, f"node-{rank}.log") for rank in self._observations.missing_ranks)
        return next(filter(None, (logs.last_line(path, _MAX_MESSAGE) for path in paths)), "")


class _SrunOutput:
    """srun's output: forwarded, with its first error and its first line kept."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open = True
        self._partial = bytearray()
        self.complaint = self.first = ""
        os.set_blocking(fd, False)

    def readable_fds(self) -> list[int]:
        return [self._fd] if self._open else []

    def read(self) -> None:
        while self._open:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            self._open = bool(data)
            with contextlib.suppress(OSError):  # a full disk
                os.write(2, data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                text = line[:_MAX_HELD].decode(errors="replace").strip()
                self.first = self.first or text
                if text.startswith(_ERROR) and not self.complaint:
                    self.complaint = text[len(_ERROR) :]
            del self._partial[_MAX_HELD:]  # of a line that does not end
