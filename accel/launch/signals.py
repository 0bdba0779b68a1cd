"""Signals of a launcher: the first that ends it, and those that the kernel drops for PID 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from schedulers.processes import die_with_parent

# Record the first termination signal (SIGTERM, SIGHUP). SIGINT already raises KeyboardInterrupt.


class TerminationSignals:
    """A recorder of SIGTERM and SIGHUP, except an ignored one (`nohup`). Works in the main thread only.

    signum: the first signal received.
    on_signal:   called with it at that moment.
    """

    def __init__(self, on_signal: Callable[[int], object] = lambda signum: None) -> None:
        self.signum: int | None = None
        self._then = on_signal
        self._before = {
            signum: previous
            for signum in (signal.SIGTERM, signal.SIGHUP)
            if (previous := signal.getsignal(signum)) not in (signal.SIG_IGN, None)
            and threading.current_thread() is threading.main_thread()
        }
        for signum in self._before:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            self._then(signum)

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal."""
        return 128 + (self.signum or 0)

    def forget(self) -> None:
        """Restore the previous handlers."""
        for signum, previous in self._before.items():
            signal.signal(signum, previous)


def run_child(command: Sequence[str]) -> int:
    """Run a command and return its exit code. It ends with this process; a termination signal ends it first."""
    parent = os.getpid()
    child = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent))
    signals = TerminationSignals(lambda _: child.send_signal(signal.SIGTERM))
    try:
        code = child.wait()
    finally:
        child.wait()  # after a KeyboardInterrupt: the child was interrupted too, and ends its ranks
        signals.forget()
    if signals.signum:
        signal.raise_signal(signals.signum)
    return code


# PID 1, as a container's command is, which the kernel treats unlike any other.
#
# PID 1 ignores signals for which it has no handler, so a program that replaced the launcher would ignore
# SIGTERM. PID 1 also inherits every orphan, and nothing else reaps those.

_FORWARDED = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
}  # fmt: skip


def stay_as_pid1() -> int | None:
    """Fork, and return None in the child, which any signal can end.

    The parent stays PID 1: it forwards signals to the child, reaps orphans, and returns the child's exit code,
    128 + N for signal N.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signums = _FORWARDED | {signal.SIGCHLD}
    # Blocked from before the fork: PID 1 keeps a signal without a handler only while it is blocked.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return None
    shared = _has_terminal()
    while True:
        received = signal.sigwait(signums)
        if received == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code
        elif not (shared and received == signal.SIGINT):
            os.kill(child, received)


def _reap(child: int) -> int | None:
    """Reap every ended process; return the exit code of `child` if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _has_terminal() -> bool:
    """Return True if the terminal sends its Ctrl-C to the child too, which is in this process's group."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
