"""The number of ranks that this machine's kernel and this user's limits allow."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from . import cgroup
from .errors import Refused


def check_room(processes: int, total: int | None) -> None:
    """Raise Refused for more processes than this machine can ever hold, whatever else runs on it.

    total: the requested number on all machines, for the message.
    """
    most, limit = min(_limits(), default=(processes, ""))
    if processes > most:
        here = "" if processes == total else f", {processes} of them here"
        raise Refused(f"--num_processes {total}{here}: this machine can hold {most} processes at most ({limit})")


def _limits() -> Iterator[tuple[int, str]]:
    """Yield each limit with its name."""
    of_user = [(resource.RLIMIT_NOFILE, "open files: ulimit -n")]  # the fork server has one for each rank
    if os.geteuid() != 0:
        of_user.append((resource.RLIMIT_NPROC, "this user's processes: ulimit -u"))
    for which, name in of_user:
        soft = resource.getrlimit(which)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft, name
    for name in ("pid_max", "threads-max"):
        try:
            with open(f"/proc/sys/kernel/{name}") as file:
                yield int(file.read()), f"kernel.{name}"
        except (OSError, ValueError):
            continue
    for text in cgroup.values("pids", v2="pids.max", v1="pids.max"):
        if text.strip().isdigit():
            yield int(text), "pids.max of its control group"
