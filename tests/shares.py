"""Which tests one worker of several runs together, and in which order they are begun.

A cluster belongs to the process that started it and costs many seconds of both: so the files that need one of a kind
are two shares, which two workers take. Any other file is a share of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
_CLUSTERS = {
    "kubernetes": ("tests/schedulers/kubernetes", "tests/helm"),
    "slurm": ("tests/schedulers/slurm", "tests/cli/test_slurm.py"),
    "ssh": ("tests/schedulers/ssh", "tests/schedulers/remote", "tests/cli/test_ssh.py"),
}
_HALVES = 2
# Begun early: files that take minutes would otherwise be what everybody waits for at the end.
_LONG = frozenset({
    "tests/test_docs.py", "tests/runtime/tracking/test_packages.py", "tests/compat/test_libraries.py",
    "tests/launch/test_kills.py", "tests/launch/test_nodes.py", "tests/cli/test_image.py",
    "tests/cli/test_estimate_memory.py", "tests/clusters/test_kubernetes.py", "tests/clusters/test_slurm.py",
})  # fmt: skip
_SECOND_HALVES_AT, _LONG_AT = 0.25, 0.05


def share(path: str, files: dict[str, list[str]] | None = None) -> str:
    """The share of a test file, by its path from the root of the project."""
    for kind, members in (_files() if files is None else files).items():
        if path in members:
            return f"{kind} {members.index(path) % _HALVES}"
    return path


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first half of each kind of cluster, the long files, the second halves among the others."""
    by_share: dict[str, list[pytest.Item]] = {}
    files = _files()
    for item in items:
        by_share.setdefault(share(item.nodeid.partition("::")[0], files), []).append(item)
    alone = [name for name in by_share if name.endswith(".py") and name not in _LONG]
    place = {name: index / len(alone) for index, name in enumerate(alone)}
    place |= dict.fromkeys(_LONG, _LONG_AT)
    place |= {f"{kind} {half}": half * _SECOND_HALVES_AT - 1e-9 for kind in _CLUSTERS for half in range(_HALVES)}
    return [item for name in sorted(by_share, key=place.__getitem__) for item in by_share[name]]


def _files() -> dict[str, list[str]]:
    """The test files that need a cluster of each kind, in an order that every process finds."""
    found: dict[str, list[str]] = {}
    for kind, places in _CLUSTERS.items():
        paths = [
            path
            for place in places
            for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("test_*.py"))
        ]
        found[kind] = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    return found


class Shares(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Hands out shares where pytest-xdist would hand out files."""

    _files: dict[str, list[str]] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._files is None:
            self._files = _files()
        return share(nodeid.partition("::")[0], self._files)
