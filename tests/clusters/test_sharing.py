"""All workers of a test run share one cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .sharing import Shared

_WORKERS = 5


def test_one_worker_starts_the_cluster_and_the_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def start() -> Iterator[tuple[str, int]]:
        events.append("start")
        yield "cluster 7", 7
        events.append("end")

    def work(turn: threading.Barrier) -> str:
        turn.wait()
        with Shared("test").cluster(start, "cluster {}".format) as cluster:
            turn.wait(60)  # all have it at the same time
            events.append("use")
        return cluster

    for run in range(20):
        monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", f"sharing-{run}")
        turn = threading.Barrier(_WORKERS)
        with ThreadPoolExecutor(_WORKERS) as pool:
            assert set(pool.map(work, [turn] * _WORKERS)) == {"cluster 7"}
        assert events == ["start", *["use"] * _WORKERS, "end"]
        events.clear()
