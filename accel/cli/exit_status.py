"""The exit codes of `accel`.

0     done; for `wait` and `submit --follow`: the job succeeded
1     the command failed (one line on stderr), or the job failed without an exit code of its own
2     the command line or a configuration file is wrong
124   `wait --timeout` ran out before the job ended
130   Ctrl-C; the job continues
141   the reader of the output closed the pipe
143   the job was cancelled
else  the exit code of the job's first failing rank (128 + N for signal N)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedulers.job import Status

OK = 0
ERROR = 1
USAGE = 2
TIMED_OUT = 124
INTERRUPTED = 130
BROKEN_PIPE = 141
CANCELLED = 143


def exit_code_of_job(status: Status) -> int:
    """Return the exit code of a command that waited for a job. `status` is final."""
    if status.state.value == "succeeded":
        return OK
    if status.state.value == "cancelled":
        return CANCELLED
    # A process can only end with 0 … 255, and a failed job must not look like one that succeeded.
    return (status.exit_code or 0) & 0xFF or ERROR
