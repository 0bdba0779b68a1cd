"""Errors of `accel launch`; each message is one line that says what to do."""

from __future__ import annotations


class LaunchError(Exception):
    """The ranks cannot be started as asked."""


class Refused(LaunchError):
    """What is asked for cannot be: the flags, the file or the scheduler's variables are wrong. Nothing was started."""


class RendezvousFailed(LaunchError):
    """The nodes did not find each other in time."""


class CannotRun(Refused):
    """The command cannot be run: exit code 127 if it is missing, else 126, as of a shell."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.exit_code = 127 if missing else 126
