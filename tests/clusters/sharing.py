"""One cluster for all workers of a test run: who starts and ends it, and which tests have it to themselves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

Cluster = TypeVar("Cluster")


class Shared:
    """A cluster of this test run. The worker that starts it ends it, when the others that have joined are done.

    start: makes the cluster, and returns it with its number.
    join:  returns the cluster of that number, which another worker has started.
    """

    def __init__(self, kind: str) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._box = Path(tempfile.gettempdir(), f"accel-{kind}-{run}")
        self._box.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def cluster(
        self, start: Callable[[], AbstractContextManager[tuple[Cluster, int]]], join: Callable[[int], Cluster]
    ) -> Iterator[Cluster]:
        with self._file("users") as users, self._file("starting") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)
            if self._started.exists():
                fcntl.flock(starting, fcntl.LOCK_UN)
                yield join(int(self._started.read_text()))
                return
            with start() as (cluster, number):
                self._started.write_text(str(number))
                fcntl.flock(starting, fcntl.LOCK_UN)
                try:
                    yield cluster
                finally:
                    fcntl.flock(users, fcntl.LOCK_EX)
                    self._started.unlink()
                    shutil.rmtree(self._box, ignore_errors=True)

    @contextlib.contextmanager
    def using(self, *, alone: bool) -> Iterator[None]:
        """Held by a test for as long as it uses the cluster; `alone`: while no other does."""
        with self._file("turn") as turn, self._file("use") as use:
            fcntl.flock(turn, fcntl.LOCK_EX)  # who waits to be alone lets nobody else begin
            fcntl.flock(use, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
            yield

    @property
    def _started(self) -> Path:
        return self._box / "started"

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[int]:
        self._box.mkdir(exist_ok=True)
        descriptor = os.open(self._box / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
