"""Errors of hosts. Every message is one line that begins with the host's name."""

from __future__ import annotations

from ..errors import SchedulerError, Unreachable

_LONGEST = 500  # characters: pip's reason and the path of its log, which has a digest in it


class HostUnreachable(Unreachable):
    """There is no connection to the host, or it was lost. The state of what runs there is unknown."""

    def __init__(self, host: str, problem: str) -> None:
        super().__init__(f"{host}: {problem}")
        self.host = host
        self.problem = problem


class HostKeyRefused(HostUnreachable):
    """The host's key is unknown, changed or revoked; nothing was sent to it."""


class LoginRefused(HostUnreachable):
    """The host accepts none of the available keys."""


class RemoteError(SchedulerError):
    """A command on a host could not be run, or failed."""

    def __init__(self, host: str, problem: str, status: int | None = None) -> None:
        super().__init__(f"{host}: {problem}")
        self.host = host
        self.problem = problem
        self.status = status


class RemoteTimeout(RemoteError):
    """A command did not end in time. It may still be running."""


def one_line(raw: bytes | str) -> str:
    """Return the last line that is not empty, for a message, with control characters escaped."""
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in last)
    return printable if len(printable) <= _LONGEST else f"{printable[:_LONGEST]}…"
