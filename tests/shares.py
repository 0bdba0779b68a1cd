"""Which tests one worker of several runs together, and in which order they are begun.

A cluster belongs to the process that started it and costs many seconds of both: so the files that need one of a kind
are a few shares, which as many workers take. Any other file is a share of its own.
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
_PARTS = {"kubernetes": 2, "slurm": 2, "ssh": 3}
# Begun early: files that take minutes would otherwise be what everybody waits for at the end.
_LONG = frozenset({
    "tests/runtime/tracking/test_packages.py", "tests/compat/test_libraries.py",
    "tests/launch/test_kills.py", "tests/launch/test_nodes.py", "tests/cli/test_image.py",
    "tests/cli/test_estimate_memory.py", "tests/clusters/test_kubernetes.py", "tests/clusters/test_slurm.py",
})  # fmt: skip
_DOCS = "tests/test_docs.py"  # whose tests are programs of their own, and take minutes together
_NEXT_PART_AT, _LONG_AT = 0.2, 0.05


def share(nodeid: str, files: dict[str, list[str]]) -> str:
    """Whose tests are run together with this one."""
    path = nodeid.partition("::")[0]
    for kind, members in files.items():
        if path in members:
            return f"{kind} {members.index(path) % _PARTS[kind]}"
    return nodeid if path == _DOCS else path


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first part of each kind of cluster, the long files, and among the others the further parts."""
    by_share: dict[str, list[pytest.Item]] = {}
    files = _files()
    for item in items:
        by_share.setdefault(share(item.nodeid, files), []).append(item)
    early = [name for name in by_share if name in _LONG or name.startswith(_DOCS)]
    alone = [name for name in by_share if name.endswith(".py") and name not in early]
    place = {name: index / len(alone) for index, name in enumerate(alone)}
    place |= dict.fromkeys(early, _LONG_AT)
    place |= {f"{kind} {part}": part * _NEXT_PART_AT - 1e-9 for kind, parts in _PARTS.items() for part in range(parts)}
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
        return share(nodeid, self._files)
