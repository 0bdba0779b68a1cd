"""Values of this process's control groups, in version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator


def values(controller: str, *, v2: str, v1: str) -> Iterator[str]:
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
