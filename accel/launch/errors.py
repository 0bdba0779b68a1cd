"""Errors of `accel launch`; each message is one line that says what to do."""

from __future__ import annotations


class LaunchError(Exception):
    """The ranks cannot be started as asked."""


class RendezvousFailed(LaunchError):
    """The nodes did not find each other in time."""
