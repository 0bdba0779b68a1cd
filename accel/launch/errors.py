"""Errors of `accel launch`. Each message is one line with the remedy."""

from __future__ import annotations


class LaunchError(Exception):
    """The ranks cannot be started."""


class LaunchConfigError(LaunchError):
    """The flags, the file or the scheduler's variables are invalid. Nothing was started."""


class RendezvousFailed(LaunchError):
    """The nodes did not find each other in time."""


class CommandNotFound(LaunchConfigError):
    """The command cannot be run. The exit code is a shell's: 127 if it is missing, else 126."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.exit_code = 127 if missing else 126
