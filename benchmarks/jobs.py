"""What the job store and the local target cost: listing 10,000 jobs, submitting one, noticing its end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .measure import Bar, interleaved, report, wall

BIN = Path(sys.executable).parent
JOBS = 10_000


def listing(rounds: int) -> bool:
    """`accel list --all` of 10,000 jobs that have ended: at most one second."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "ACCEL_HOME": folder}
        _fill(Path(folder), JOBS)
        measures = {
            "one second": lambda: 1.0,
            f"accel list --all, {JOBS} jobs": wall([str(BIN / "accel"), "list", "--all"], env),
        }
        bars = [Bar(ours=f"accel list --all, {JOBS} jobs", base="one second", limit=1)]
        return report("list", interleaved(measures, rounds), bars)


def logs(rounds: int) -> bool:
    """The last 5 lines of a log of 50 MB: at most a fifth more than those of a log of 5 lines."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ACCEL_HOME"] = folder
        lines = {"5 lines": 5, "50 MB": 500_000}
        jobs = {size: _printing(Path(folder), count) for size, count in lines.items()}
        accel = str(BIN / "accel")
        measures = {f"accel logs --tail 5, {size}": wall([accel, "logs", "--tail", "5", jobs[size]]) for size in lines}
        measures["accel logs, 50 MB"] = wall([accel, "logs", jobs["50 MB"]])
        bars = [Bar(ours="accel logs --tail 5, 50 MB", base="accel logs --tail 5, 5 lines", limit=1.2)]
        return report("logs", interleaved(measures, rounds), bars)


def _printing(folder: Path, lines: int) -> str:
    """A job that has printed ``lines`` lines of 100 bytes; its id."""
    import schedulers

    script = folder / "lines.py"
    script.write_text("import sys\nfor n in range(int(sys.argv[1])):\n    print(f'{n:099d}')\n")
    job = schedulers.submit(str(script), [str(lines)], cwd=str(folder))
    job.wait()
    return str(job.id)


def noticing(rounds: int) -> bool:
    """From the last thing that a job's only process does to the return of `job.wait()`: at most 50 ms."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ACCEL_HOME"] = folder
        script = Path(folder, "stamp.py")
        script.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(repr(time.time()))\nos._exit(0)\n")
        seconds = interleaved({"50 ms": lambda: 0.05, "end to wait()": _end_to_wait(folder, script)}, rounds)
        return report("wait", seconds, [Bar(ours="end to wait()", base="50 ms", limit=1)])


def _end_to_wait(folder: str, script: Path) -> Callable[[], float]:
    import schedulers

    def measure() -> float:
        stamp = Path(folder, "stamp")
        job = schedulers.submit(str(script), [str(stamp)], cwd=folder)
        job.wait()
        return time.time() - float(stamp.read_text())

    return measure


def _fill(home: Path, count: int) -> None:
    """A store of finished jobs: one real one, and copies of it under other ids."""
    from schedulers.store.store import Store

    script = home / "hello.py"
    script.write_text("print('hello')\n")
    os.environ["ACCEL_HOME"] = str(home)
    import schedulers

    job = schedulers.submit(str(script), cwd=str(home))
    job.wait()
    store = Store(home)
    files = [path for path in (store.jobs / job.id).iterdir() if path.is_file()]
    for _ in range(count - 1):
        copy = store.jobs / store.new_id()
        copy.mkdir()
        for path in files:
            shutil.copy(path, copy)
