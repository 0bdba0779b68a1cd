"""Errors that a caller of `schedulers` may catch. Every message is one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .status import Status


class SchedulerError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class SpecError(SchedulerError):
    """An invalid job: a wrong value, or something that the target does not support."""


class OptionError(SpecError):
    """A wrong value of one option, raised by the schema. The message of `make_options` then has the option's line."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class ConfigError(SchedulerError):
    """Error in a configuration file; the message begins with `file:line`."""


class UnknownTarget(ConfigError):
    """Error for an unknown target or kind."""


class UnknownJob(SchedulerError):
    """Error for an id or prefix that matches no job, or several."""


class StoreError(SchedulerError):
    """Error in reading or writing the job store (damaged or newer file, full disk, no permission)."""


class StoreNotWritable(StoreError):
    """Error in writing the job store, for instance on a full or read-only disk. It may be readable."""


class SnapshotError(SchedulerError):
    """Error in packing the code directory."""


class SubmitError(SchedulerError):
    """The backend rejected the job; it is not running.

    native_id: id of a part of the job that did start and must be cancelled.
    """

    native_id: str | None = None


class JobFailed(SchedulerError):
    """The job whose result was requested has failed or was cancelled. The message has its status."""


class NotReady(SchedulerError):
    """The requested part of a job does not exist, or not yet."""


class Unreachable(SchedulerError):
    """The backend, or a part of it, could not be reached. The state of the jobs there is unknown, not failed.

    silent:  native id -> why, of the jobs that could not be polled; None if that is all of them.
    answers: the statuses of the others, as `poll` returns them.
    """

    def __init__(
        self, message: str, *, answers: Mapping[str, Status] | None = None, silent: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.answers = answers or {}
        self.silent = silent


class CredentialsExpired(Unreachable):
    """Error for credentials that the backend no longer accepts. The message says how to sign in again."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return a hint for a message, `; did you mean 'x'?`, or an empty string if no valid word is close."""
    import difflib

    suggestions = difflib.get_close_matches(word, list(valid), n=1)
    return f"; did you mean {suggestions[0]!r}?" if suggestions else ""
