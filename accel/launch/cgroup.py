"""What the control groups of this process say, of either version."""

from __future__ import annotations

from collections.abc import Iterator


def values(controller: str, *, v2: str, v1: str) -> Iterator[str]:
    """The text of the controller's file in the group of this process and in those above it: ``v2`` or ``v1`` by the
    version that the system has. Nothing where it does not tell."""
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
