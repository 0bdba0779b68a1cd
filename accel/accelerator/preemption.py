"""Preemption warnings. All processes learn of them at the same step, in time for a checkpoint.

Signal handlers only set a flag. An asynchronous all-reduce, started at one read of `Accelerator.preempted`
and finished at a later one, combines the flags, so that no step waits for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accel.accelerator.run import Part
from accel.errors import StateError
from accel.logging import get_logger
from accel.state import AcceleratorState
from accel.world.process_group import new_group

logger = get_logger(__name__)

_PAUSE_S = 0.1
_MAX_READINGS = 16
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


class Warnings:
    """Warning signals that this process received, recorded by handlers that do nothing else.

    ``SIGUSR1`` and ``SIGUSR2`` are handled from the start if the launcher set them to be ignored, ``SIGTERM``
    from the first read of `Accelerator.preempted`. Until then all handlers stay as they were.
    """

    received: ClassVar[int | None] = None
    _before: ClassVar[dict[int, Any]] = {}
    _owner: ClassVar[int] = 0

    @classmethod
    def install_ignored(cls) -> None:
        """Install handlers for warning signals that are ignored so far. Does nothing outside the main thread."""
        if _in_main_thread():
            for signum in _WARNINGS:
                if signum not in cls._before and signal.getsignal(signum) is signal.SIG_IGN:
                    cls._install(signum)

    @classmethod
    def install(cls) -> bool:
        """Install handlers for all warning signals; return False outside the main thread, where it is impossible."""
        if not _in_main_thread():
            return False
        for signum in (signal.SIGTERM, *_WARNINGS):
            if signum not in cls._before:
                cls._install(signum)
        return True

    @classmethod
    def restore(cls) -> None:
        """Restore the previous handlers, except where the script has set another one since."""
        if _in_main_thread():
            for signum, handler in cls._before.items():
                if signal.getsignal(signum) == cls._record and handler is not None:
                    signal.signal(signum, handler)
            cls._before.clear()
        cls.received = None

    @classmethod
    def _install(cls, signum: int) -> None:
        cls._owner = os.getpid()
        cls._before[signum] = signal.signal(signum, cls._record)

    @classmethod
    def _record(cls, signum: int, _: FrameType | None) -> None:
        if os.getpid() == cls._owner:
            cls.received = signum
            return
        # In a forked child: its parent must still be able to terminate it.
        signal.signal(signum, cls._before.get(signum) or signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Agreement:
    """Agreement of all processes on whether one was warned: equal on all of them at the same read.

    Every process must call `read` equally often. An exchange starts every 1 to 16 reads, about every 0.1 s on the
    slowest process; a warning reaches all processes after two or three exchanges.
    """

    def __init__(self, state: AcceleratorState) -> None:
        self._is_single_process = not state.use_distributed
        self._group: Any = None
        self._work: Any = None
        self._votes = torch.zeros(2, dtype=torch.int64)
        self._readings_left = 0
        self._interval = 1
        self._since = 0.0
        self.reached = False

    def read(self) -> bool:
        """Return True once all processes know that one was warned. Raises `RuntimeError` if a process is gone."""
        if self.reached:
            return True
        if self._is_single_process:
            self.reached = Warnings.received is not None
            return self.reached
        if self._readings_left:
            self._readings_left -= 1
            return False
        self._exchange()
        return self.reached

    def _exchange(self) -> None:
        now = time.monotonic()
        if self._group is None:
            self._group = new_group(backend="gloo")
        if self._work is not None:
            self._work.wait()
            warned, negative_interval = self._votes.tolist()
            self.reached = bool(warned)
            step_s = max((now - self._since) / self._interval, 1e-9)
            interval = max(1, min(_MAX_READINGS, int(_PAUSE_S / step_s)))
            self._interval = -negative_interval
        else:
            interval = 1
        self._since = now
        self._readings_left = self._interval - 1
        self._work = None
        if not self.reached:
            self._votes = torch.tensor([Warnings.received is not None, -interval], dtype=torch.int64)
            self._work = dist.all_reduce(self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def drop(self) -> None:
        """Wait for the exchange in progress, if its processes still exist, and drop the group."""
        work, self._work, self._group = self._work, None, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                logger.debug(f"the last exchange about preemption failed: {error}", main_process_only=False)


class PreemptionControl(Part):
    """The part of `Accelerator` that detects preemption."""

    def _init_preemption(self) -> None:
        self._preemption = Agreement(self.state)
        self._watching = False
        Warnings.install_ignored()

    @property
    def preempted(self) -> bool:
        """True once a warning signal has reached any process: this run is about to be ended from outside.

        Turns true on every process at the same read, and stays so. Every process must read it equally often, at the
        same places, such as once per step. Warnings are ``SIGTERM``, ``SIGUSR1`` and ``SIGUSR2``, from the first read
        on (the latter two, under ``accel launch``, from the creation of the `Accelerator`). They then no longer end
        the process, and the script's own handlers for them are not called until `end_training` restores them.

        Raises `StateError` if it is first read outside the main thread, where Python handles no signals.
        """
        if not self._watching:
            self._watch()
        return self._preemption.read()

    def _watch(self) -> None:
        if not Warnings.install():
            raise StateError("Accelerator.preempted must first be read in the main thread: signals go there")
        self._watching = True

    def _end_preemption(self) -> None:
        self._preemption.drop()
        if self._watching:
            self._watching = False
            Warnings.restore()
