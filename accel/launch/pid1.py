"""PID 1 of a namespace, as a container's command is, with the kernel's special rules.

PID 1 ignores signals for which it has no handler, so a program that replaced the launcher would ignore
SIGTERM. PID 1 also inherits every orphan, and nothing else reaps those.
"""

from __future__ import annotations

import os
import signal
import sys

_FORWARDED = {
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
}  # fmt: skip


def stay() -> int | None:
    """Fork, and return None in the child, which any signal can end.

    The parent stays PID 1: it forwards signals to the child, reaps orphans, and returns the child's exit code,
    128 + N for signal N.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    awaited = _FORWARDED | {signal.SIGCHLD}
    # Blocked from before the fork: PID 1 keeps a signal without a handler only while it is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    shared = _has_terminal()
    while True:
        received = signal.sigwait(awaited)
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
