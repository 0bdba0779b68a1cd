"""What holds for every test. Needs pytest alone: a folder that needs more imports it in its own conftest.py."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from .shares import SERVERS, in_order, needs_a_server, scheduler, seconds_by_folder

if find_spec("hypothesis") is not None:
    from . import examples  # noqa: F401  # chooses how many


_END = (signal.SIGTERM, signal.SIGHUP)
_ended_early = False


def pytest_addoption(parser: pytest.Parser) -> None:
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "Seconds after which a test has failed (pytest-timeout, which is not installed)")


def pytest_configure(config: pytest.Config) -> None:
    """Take the signals that a shell has ignored in what it runs in the background: the tests' programs inherit that."""
    config.addinivalue_line(
        "markers", f"server: takes a cluster ({', '.join(SERVERS)}) or minutes, as tests/shares.py lists"
    )
    config.addinivalue_line(
        "markers", "long: repeats a scenario for more moments, sizes or kinds: `make test-all` alone"
    )
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU (`make test-gpu`); the other tests do not use one")
    config.addinivalue_line("markers", "alone: breaks a part of the Kubernetes cluster, and has it to itself meanwhile")
    if find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        for signum in _END:
            signal.signal(signum, _end_run)


def _end_run(signum: int, _: object) -> None:
    """End the run as Ctrl-C does, which stops its clusters. Further signals do not interrupt that."""
    for other in (signal.SIGINT, *_END):
        signal.signal(other, signal.SIG_IGN)
    pytest.exit(f"ended by {signal.Signals(signum).name}", 128 + signum)


def pytest_keyboard_interrupt() -> None:
    global _ended_early
    _ended_early = True


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the clusters of workers that were ended: pytest-xdist kills them after 10 seconds, or the signal did."""
    if _ended_early and not hasattr(config, "workerinput"):
        from .clusters.leftovers import stop_abandoned

        stop_abandoned()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where shares go to several workers, this order holds with --no-loadscope-reorder."""
    items[:] = in_order(items)
    for item in items:
        if needs_a_server(item.nodeid):
            item.add_marker("server")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU (make test-gpu)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    return scheduler(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Refuse to run where a test module has put accel in Accelerate's place: others compare accel with Accelerate."""
    if "accel.compat" in sys.modules:
        pytest.exit("a test module imports accel.compat: do it in a child process (tests/compat/children.py)", 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each folder below the slowest tests, where these are asked for (--durations)."""
    if config.getoption("durations") is not None:
        terminalreporter.section("seconds of each folder")
        for folder, seconds in seconds_by_folder(terminalreporter.stats):
            terminalreporter.write_line(f"{seconds:8.1f}  {folder}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that failed shows what its cluster says."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        given: dict[str, Any] = item.funcargs
        for cluster in given.values():
            if hasattr(cluster, "diagnose"):
                report.sections.append((f"{type(cluster).__name__} cluster", cluster.diagnose()))
    return report  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def no_state_is_left() -> Iterator[None]:
    """Forget the states that a test has made in this process: the next one may stand in another file."""
    yield
    states = sys.modules.get("accel.state")
    if states is not None:
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
