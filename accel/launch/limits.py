"""Values of control groups (v1 and v2), and the number of processes that this machine allows."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from .errors import LaunchConfigError


def cgroup_values(controller: str, *, v2: str, v1: str) -> Iterator[str]:
    """Yield the text of a controller's file in this process's control group and in each group above it.

    The file's name is ``v2`` or ``v1``, by the system's version. Yields nothing if it cannot be read.
    """
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in groups:
        if not controllers:
            root, name = "/sys/fs/cgroup", v2
        elif controller in controllers.split(","):
            root, name = f"/sys/fs/cgroup/{controller}", v1
        else:
            continue
        while True:
            text = _text(f"{root}{path.rstrip('/')}/{name}")
            if text is not None:
                yield text
            if path in ("/", ""):
                break
            path = path.rpartition("/")[0]


def _text(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def check_process_limits(processes: int, total: int | None) -> None:
    """Raise LaunchConfigError for more processes than this machine allows, regardless of what else runs on it.

    total: the requested number on all machines, for the message.
    """
    maximum, limit = min(_limits(), default=(processes, ""))
    if processes > maximum:
        local = "" if processes == total else f", {processes} of them here"
        raise LaunchConfigError(
            f"--num_processes {total}{local}: this machine can run at most {maximum} processes ({limit})"
        )


def _limits() -> Iterator[tuple[int, str]]:
    """Yield each limit with its name."""
    limits = [(resource.RLIMIT_NOFILE, "open files: ulimit -n")]  # the fork server opens one per rank
    if os.geteuid() != 0:
        limits.append((resource.RLIMIT_NPROC, "this user's processes: ulimit -u"))
    for resource_id, name in limits:
        soft = resource.getrlimit(resource_id)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft, name
    for name in ("pid_max", "threads-max"):
        try:
            with open(f"/proc/sys/kernel/{name}") as file:
                yield int(file.read()), f"kernel.{name}"
        except (OSError, ValueError):
            continue
    for text in cgroup_values("pids", v2="pids.max", v1="pids.max"):
        if text.strip().isdigit():
            yield int(text), "pids.max of its control group"
