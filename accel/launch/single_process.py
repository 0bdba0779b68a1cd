"""One rank on this node with a log file: no agent and no torch, but a failure report."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from types import FrameType

from accel.exit_codes import REQUEUE
from schedulers.processes import adopt_orphans, descendants, die_with_parent, end_all, signal_name, wake_pipe

from . import failure as failures
from . import watchdog
from .console import cannot_run, event_writer, is_repeated_signal, log_path, print_message
from .plan import Launch
from .tee import Tee
from .worker import WARNINGS, ignore_warnings, open_log

_LEFTOVER_GRACE_S = 2.0


def run_single(run: Launch, launch_id: str) -> int:
    """Run the program to its end as a child of this process. No process that it started is left on return.

    Returns its exit code (128 + N for signal N), or 128 + N if this process received termination signal N.
    """
    log = log_path(run.log_dir, run.node_rank, run.first_attempt)
    record = event_writer(run.log_dir, run.events)
    adopt_orphans()
    watchdog_handle = watchdog.start(launch_id)
    oom_kills = failures.oom_kill_count()
    record("attempt", attempt=run.first_attempt)
    tee = Tee(run.tee, run.log_dir)
    watch = _Watch(run.grace_s)
    if run.deadline is not None:
        run.deadline.arm()
    try:
        watch.program = _start(run, log)
        tee.follow([(0, run.node_rank, log)])
        code = watch.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python restores its default action, death, before it exits
        end_all(
            lambda: watchdog_handle.other_processes(descendants(os.getpid())),
            grace_s=min(run.grace_s, _LEFTOVER_GRACE_S),
        )
        tee.close()
        watchdog_handle.dismiss()
    if watch.signum == signal.SIGALRM and run.deadline is not None:
        return run.deadline.end(run.quiet, run.report)
    if watch.signum is not None and code != REQUEUE:
        run.report.record({"message": f"received {signal_name(watch.signum)}"})
        return 128 + watch.signum
    if code == 0:
        return 0
    end = failures.Exit(rank=run.node_rank, local_rank=0, pid=watch.program.pid, code=code, time=time.time(),
                      error=failures.error_in_log(log, code), log=log)  # fmt: skip
    failure = failures.diagnose(end, node=run.node_rank, host=socket.gethostname(), attempt=run.incarnation.attempt,
                              oom_kills=failures.oom_kill_count() - oom_kills, others="")  # fmt: skip
    record("failure", failure=failure.to_json())
    run.report.record(failure.summary())
    if not run.quiet:
        print_message(failure.text())
    return failure.exit_code


def _start(run: Launch, log: str | None) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def enter() -> None:
        die_with_parent(signal.SIGKILL, parent)
        ignore_warnings()

    command = run.program.command()
    try:
        with open(open_log(log or os.devnull), "ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output if log else None,
                stderr=output if log else None,
                start_new_session=True,
                preexec_fn=enter,
            )
    except OSError as error:
        raise cannot_run(command, error) from None


class _Watch:
    """A watch over the program: forwards signals, and kills it after the grace period.

    The handlers are set before the program starts: a signal in between is forwarded late, not lost.
    """

    program: subprocess.Popen[bytes]

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deadline: float | None = None
        self._pending: list[int] = []
        self.signum: int | None = None  # the first termination signal; SIGALRM for the time limit
        self._wake_read, wake_fd = wake_pipe()
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(signum, self._on_termination)
        for signum in WARNINGS:
            signal.signal(signum, lambda received, _: self._pending.append(received))

    def _on_termination(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None and is_repeated_signal(signum):
            return
        now = time.monotonic()
        self._deadline = now + self._grace_s if self.signum is None else now  # a second signal ends the grace
        if self.signum is None:
            self.signum = signum
            self._pending.append(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def wait(self) -> int:
        while (code := self.program.poll()) is None:
            while self._pending:
                self.program.send_signal(self._pending.pop(0))
            timeout = None if self._deadline is None else self._deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                self.program.kill()
                return self.program.wait()
            if select.select([self._wake_read], [], [], timeout)[0]:
                os.read(self._wake_read, 4096)
        return code
