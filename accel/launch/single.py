"""One rank on this node, with its log in a file: nobody to agree with, so no agent and no torch; but a report."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from schedulers.processes import adopt_orphans, descendants, die_with_parent, end_all

from . import report
from .node import Launch, die_of, log_path, recorder
from .worker import WARNINGS, ignore_warnings, redirect


def run_single(run: Launch) -> int:
    """Runs the program to its end as a child of this process; nothing that it started is left when this returns.

    Returns its exit code (128 + N for signal N), or 128 + N when this process was told to end by signal N.
    """
    log = log_path(run.log_dir, 0, 0)
    record = recorder(run.log_dir)
    adopt_orphans()
    oom_kills = report.oom_kill_count()
    record("attempt", attempt=0)
    watch = _Watch(_start(run, log), run.grace_s)
    code = watch.until_end()
    end_all(lambda: descendants(os.getpid()), grace_s=min(run.grace_s, 2.0), reap=_reap)
    if watch.told is not None:
        return die_of(watch.told)
    if code == 0:
        return 0
    one = report.Exit(rank=0, local_rank=0, pid=watch.pid, code=code, time=time.time(),
                      error=report.error_in_log(log), log=log)  # fmt: skip
    failure = report.diagnose(one, node=0, host=socket.gethostname(), attempt=0,
                              oom_kills=report.oom_kill_count() - oom_kills, others="")  # fmt: skip
    record("failure", failure=failure.to_json())
    if not run.quiet:
        print(failure.text(), file=sys.stderr, flush=True)
    return failure.exit_code


def _start(run: Launch, log: str | None) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def enter() -> None:
        die_with_parent(signal.SIGKILL, parent)
        ignore_warnings()
        redirect(log)

    return subprocess.Popen(run.program.command(), start_new_session=True, preexec_fn=enter)


class _Watch:
    """Waits for the program's end; passes signals on; kills it when the grace is over."""

    def __init__(self, program: subprocess.Popen[bytes], grace_s: float) -> None:
        self._program = program
        self._grace_s = grace_s
        self._deadline: float | None = None
        self.pid = program.pid
        self.told: int | None = None
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_end)
        for signum in WARNINGS:
            signal.signal(signum, lambda received, _: program.send_signal(received))

    def _on_end(self, signum: int, _: FrameType | None) -> None:
        now = time.monotonic()
        self._deadline = now + self._grace_s if self.told is None else now  # asked twice: no more grace
        if self.told is None:
            self.told = signum
            self._program.send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def until_end(self) -> int:
        while (code := self._program.poll()) is None:
            patience = None if self._deadline is None else self._deadline - time.monotonic()
            if patience is not None and patience <= 0:
                self._program.kill()
                return self._program.wait()
            if select.select([self._woken], [], [], patience)[0]:
                os.read(self._woken, 4096)
        return code


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
