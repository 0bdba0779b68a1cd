"""Errors that a caller of `schedulers` may catch. Every message is one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .status import Status


class SchedulerError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class SpecError(SchedulerError):
    """The job, as described, cannot run: a wrong value, or something that this target cannot do."""


class ConfigError(SchedulerError):
    """A configuration file is wrong; the message begins with `file:line`."""


class UnknownTarget(ConfigError):
    """No target of that name or kind."""


class UnknownJob(SchedulerError):
    """No job, or more than one, answers to that id or prefix."""


class StoreError(SchedulerError):
    """The job store cannot be read or written (damaged or newer file, full disk, no permission)."""


class SnapshotError(SchedulerError):
    """The code directory cannot be packed."""


class SubmitError(SchedulerError):
    """The backend refused the job; it is not running.

    native_id: of a part of the job that was started all the same, and is to be cancelled.
    """

    native_id: str | None = None


class NotReady(SchedulerError):
    """What is asked of a job is not there, or not there yet."""


class Unreachable(SchedulerError):
    """The backend, or a part of it, could not be asked. Says nothing about the jobs that it could not be asked about.

    silent:  native id -> why, of those jobs; None where it was all of them.
    answers: what `poll` found out about the others, as it returns it.
    """

    def __init__(
        self, message: str, *, answers: Mapping[str, Status] | None = None, silent: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.answers = answers or {}
        self.silent = silent


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a message: `; did you mean 'x'?`, or nothing when no valid word is near."""
    import difflib

    near = difflib.get_close_matches(word, list(valid), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
