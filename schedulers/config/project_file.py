"""The project's `accel.yaml`: the nearest one up to the project's root that no other user could have written."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator

from ..printable import one_line

FILE = "accel.yaml"
TRUST = "ACCEL_CONFIG_TRUST"

_warned: set[str] = set()


def find(start: str) -> tuple[str | None, list[str]]:
    """Return the path of the project's file, if there is one, and a warning for each file that was skipped.

    The search ends at the root of the project: the git work tree or the home directory, whichever is nearer, or else
    the last directory on the file system of `start`. A file counts when it, the link that leads to it and its
    directory belong to this user or to root, or when `ACCEL_CONFIG_TRUST` names it or a directory above it.
    """
    warnings: list[str] = []
    for directory in _upward(os.path.realpath(start)):
        path = os.path.join(directory, FILE)
        if not os.path.isfile(path):
            continue
        problem = None if _is_trusted(path) else _foreign(directory, path)
        if problem is None:
            return path, warnings
        accepted = f"{TRUST}={shlex.quote(path)}"
        warnings.append(f"{path}: skipped: {problem}, neither you nor root. Set {accepted} to accept it")
    return None, warnings


def warn(warnings: list[str]) -> None:
    """Log each warning once per process."""
    import logging

    for warning in warnings:
        if warning not in _warned:
            _warned.add(warning)
            logging.getLogger(__name__).warning("%s", one_line(warning))


def _upward(start: str) -> Iterator[str]:
    """Yield `start` and the directories above it, up to the project's root."""
    home = os.path.realpath(os.path.expanduser("~"))
    directories = [start]
    while not (os.path.lexists(os.path.join(directories[-1], ".git")) or directories[-1] == home):
        parent = os.path.dirname(directories[-1])
        if parent == directories[-1]:
            return _on_one_device(directories)
        directories.append(parent)
    return iter(directories)


def _on_one_device(directories: list[str]) -> Iterator[str]:
    """Yield the directories before the first one on another file system; one that is missing is on none."""
    devices = {path: _device(path) for path in directories}
    first = next((device for device in devices.values() if device is not None), None)
    return itertools.takewhile(lambda path: devices[path] in (None, first), directories)


def _device(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def _is_trusted(path: str) -> bool:
    """Return True if `ACCEL_CONFIG_TRUST`, a list of paths as in PATH, names the file or a directory above it."""
    listed = [os.path.expanduser(each) for each in os.environ.get(TRUST, "").split(os.pathsep) if each]
    return any(path == each or path.startswith(each.rstrip(os.sep) + os.sep) for each in map(os.path.realpath, listed))


def _foreign(directory: str, path: str) -> str | None:
    """Return `it belongs to NAME` if the file, the link to it or its directory belongs to another user."""
    try:
        owners = {os.stat(directory).st_uid: "its directory", os.lstat(path).st_uid: "it", os.stat(path).st_uid: "it"}
    except OSError:  # deleted or renamed meanwhile
        return "it cannot be examined, and may belong to another user"
    what, owner = next(((what, uid) for uid, what in owners.items() if uid not in (0, os.geteuid())), ("", 0))
    return f"{what} belongs to {_name(owner)}" if what else None


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
