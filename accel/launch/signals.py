"""Record the first termination signal (SIGTERM, SIGHUP). SIGINT already raises KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from schedulers.processes import die_with_parent


class Told:
    """A recorder of SIGTERM and SIGHUP, except an ignored one (`nohup`). Works in the main thread only.

    signum: the first signal received.
    then:   called with it at that moment.
    """

    def __init__(self, then: Callable[[int], object] = lambda signum: None) -> None:
        self.signum: int | None = None
        self._then = then
        self._before = {
            signum: before
            for signum in (signal.SIGTERM, signal.SIGHUP)
            if (before := signal.getsignal(signum)) not in (signal.SIG_IGN, None)
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
        for signum, before in self._before.items():
            signal.signal(signum, before)


def run_child(command: Sequence[str]) -> int:
    """Run a command and return its exit code. It ends with this process; a termination signal ends it first."""
    parent = os.getpid()
    child = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent))
    told = Told(lambda _: child.send_signal(signal.SIGTERM))
    try:
        code = child.wait()
    finally:
        child.wait()  # after a KeyboardInterrupt: the child was interrupted too, and ends its ranks
        told.forget()
    if told.signum:
        signal.raise_signal(told.signum)
    return code
