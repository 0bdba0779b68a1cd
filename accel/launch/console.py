"""Messages and the event log of a launcher, and the paths of its ranks' logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from .errors import CommandNotFound
from .worker import open_log


def print_message(text: str) -> None:
    """Print to stderr. A closed stderr affects neither the gang nor its exit code."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def is_repeated_signal(signum: int) -> bool:
    """Return True for a second signal that must not shorten the grace period: SIGALRM, or Slurm's second SIGTERM."""
    return signum == signal.SIGALRM or (signum == signal.SIGTERM and "SLURM_STEP_ID" in os.environ)


def log_path(log_dir: str | None, rank: int, attempt: int) -> str | None:
    return os.path.join(log_dir, f"rank-{rank}.a{attempt}.log") if log_dir else None


def event_writer(log_dir: str | None, events: str | None = None) -> Callable[..., None]:
    """Return a function that appends JSON events to `events`, by default `launch.jsonl` in the log directory.

    The function does nothing without a log directory.
    """

    def record(event: str, **facts: Any) -> None:
        if log_dir is None:
            return
        line = json.dumps({"schema": 1, "event": event, "time": time.time(), **facts}) + "\n"
        with contextlib.suppress(OSError):  # a full disk must not end a training run
            fd = open_log(events or os.path.join(log_dir, "launch.jsonl"), os.O_RDWR)
            try:
                size = os.fstat(fd).st_size
                torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a full disk cut the last line short
                os.write(fd, b"\n" * torn + line.encode())
            finally:
                os.close(fd)

    return record


def cannot_run(command: list[str], error: OSError) -> CommandNotFound:
    missing = isinstance(error, FileNotFoundError)
    return CommandNotFound(f"cannot run {command[0]!r}: {error.strerror}", missing=missing)
