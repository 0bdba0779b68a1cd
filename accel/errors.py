"""What the runtime raises. Every message is one line: what was wrong, where it came from, what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AccelError(Exception):
    """Base of every error that accel raises on purpose."""


class ArgumentError(AccelError, ValueError):
    """An argument, or an environment variable that stands for one, has a value that cannot be used."""


class CallError(ArgumentError, TypeError):
    """A function was called with an argument that it takes from elsewhere."""


class WorldError(AccelError, RuntimeError):
    """The environment does not describe one world of processes, or that world could not be formed."""


class ProcessError(AccelError, RuntimeError):
    """A process that was started to run a function has failed. The first line says it; its traceback follows."""


class StateError(AccelError, RuntimeError):
    """Something was asked in the wrong order, or twice with different answers."""


class PrecisionError(ArgumentError):
    """A numeric precision that this device does not have."""


class DataError(AccelError, ValueError):
    """A data loader that cannot be shared out among the processes as asked."""


class CollectiveError(AccelError, RuntimeError):
    """The processes came to a collective operation with data that do not fit together."""


class LeafError(CollectiveError, TypeError):
    """Something in a nest is of a type that the operation cannot take."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint could not be written, or is missing, damaged, or does not fit the objects it is loaded into."""


class TrackerError(AccelError, RuntimeError):
    """An experiment tracker could not be started as it is set up."""


def nearest(value: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to ``value``, or nothing if none is close."""
    match = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def one_of(value: object, known: Iterable[str], *, what: str) -> str:
    """Return ``value`` if it is one of ``known``; else `ArgumentError` names ``what``, the choices, the nearest."""
    choices = list(known)
    if isinstance(value, str) and value in choices:
        return value
    raise ArgumentError(f"{what}: {value!r} is none of {', '.join(choices)}{nearest(str(value), choices)}")
