"""What holds for every test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# How long an example takes says something of the machine, and of what else runs there.
hypothesis.settings.register_profile("accel", deadline=None)
hypothesis.settings.load_profile("accel")


def pytest_configure() -> None:
    """Take the signals that a shell has ignored in what it runs in the background: the tests' programs inherit that."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files whose tests wait for clusters with those that compute: side by side, neither waits for the other.

    Where files are shared out among workers, that holds with --no-loadscope-reorder, which keeps this order.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if _waits(path)]
    others = [path for path in files if not _waits(path)]
    ranked = [*_spaced(waiting), *_spaced(others)]
    items[:] = [item for _, path in sorted(ranked, key=lambda pair: pair[0]) for item in files[path]]


def _waits(path: Path) -> bool:
    return not {"clusters", "helm", "kubernetes", "remote", "slurm", "ssh"}.isdisjoint(path.parts)


def _spaced(paths: list[Path]) -> list[tuple[float, Path]]:
    """Each with its place between 0 and 1."""
    return [(index / len(paths), path) for index, path in enumerate(paths)]


def pytest_collection_finish() -> None:
    """Refuse to run where a test module has put accel in Accelerate's place: others compare accel with Accelerate."""
    if "accel.compat" in sys.modules:
        pytest.exit("a test module imports accel.compat: do it in a child process (tests/compat/children.py)", 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that failed shows what its cluster says."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        given: dict[str, Any] = item.funcargs
        for cluster in given.values():
            if hasattr(cluster, "diagnose"):
                report.sections.append((f"cluster {cluster.slot.tag}", cluster.diagnose()))
    return report  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def no_state_is_left() -> Iterator[None]:
    """Forget the states that a test has made in this process: the next one may stand in another file."""
    yield
    states = sys.modules.get("accel.state")
    if states is not None:
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
