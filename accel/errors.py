"""The runtime's errors. Every message is one line: the problem, its source, and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AccelError(Exception):
    """Base of every error that accel raises on purpose."""


class ArgumentError(AccelError, ValueError):
    """An argument, or the environment variable for one, has an invalid value."""


class CallError(ArgumentError, TypeError):
    """A function was called with an argument that is supplied elsewhere."""


class WorldError(AccelError, RuntimeError):
    """The environment does not describe one world of processes, or that world could not be formed."""


class ProcessError(AccelError, RuntimeError):
    """A process started to run a function has failed. The first line is the summary; the traceback follows."""


class StateError(AccelError, RuntimeError):
    """A call came in the wrong order, or contradicts an earlier one."""


class PrecisionError(ArgumentError):
    """The device does not support a numeric precision."""


class DataError(AccelError, ValueError):
    """A data loader cannot be split over the processes as requested."""


class CollectiveError(AccelError, RuntimeError):
    """The processes entered a collective operation with data that do not match."""


class LeafError(CollectiveError, TypeError):
    """A leaf of nested data has a type that the operation does not support."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint could not be written, or is missing, damaged, or does not fit the objects it is loaded into."""


class TrackerError(AccelError, RuntimeError):
    """An experiment tracker could not be started with its settings."""


def nearest(value: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to ``value``, or nothing if none is close."""
    match = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def one_of(value: object, known: Iterable[str], *, source: str) -> str:
    """Return ``value`` if it is in ``known``; else raise `ArgumentError` with ``source``, the choices, the nearest."""
    choices = list(known)
    if isinstance(value, str) and value in choices:
        return value
    raise ArgumentError(f"{source}: {value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}")
