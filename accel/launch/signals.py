"""Signals of a launcher: the first termination signal, and forwarding as PID 1."""

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

    signum:    the first signal received, or None.
    on_signal: called with it, in the handler.
    """

    def __init__(self, on_signal: Callable[[int], object] = lambda signum: None) -> None:
        self.signum: int | None = None
        self._on_signal = on_signal
        self._previous_handlers = {
            signum: previous
            for signum in (signal.SIGTERM, signal.SIGHUP)
            if (previous := signal.getsignal(signum)) not in (signal.SIG_IGN, None)
            and threading.current_thread() is threading.main_thread()
        }
        for signum in self._previous_handlers:
            signal.signal(signum, self._record)

    def _record(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            self._on_signal(signum)

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal."""
        return 128 + (self.signum or 0)

    def forget(self) -> None:
        """Restore the previous handlers."""
        for signum, previous in self._previous_handlers.items():
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


# PID 1, which a container's command is. It ignores signals without a handler, so a program that replaced the launcher
# would ignore SIGTERM. It also inherits all orphans, and must reap them.

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
    # Blocked before the fork: the kernel drops PID 1's signals that have no handler unless they are blocked.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return None
    shares_terminal = _has_terminal()
    while True:
        received = signal.sigwait(signums)
        if received == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code
        elif not (shares_terminal and received == signal.SIGINT):
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
