"""Jobs on the real local target, in a store of their own; nothing of them is left when a test ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import schedulers
from schedulers import Job
from schedulers.local.job_files import JobFiles
from schedulers.processes import Identity
from tests.waiting import until as until

Submit = Callable[..., Job]


@pytest.fixture
def submit(home: Path, project: Path) -> Iterator[Submit]:
    """Submits `script` (the text of a program) to the local target."""
    jobs: list[Job] = []

    def submit(text: str, args: tuple[str, ...] = (), *, name: str = "train.py", **options: object) -> Job:
        (project / name).write_text(text)
        job = schedulers.submit(name, args, cwd=project, **options)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        supervisor = supervisor_of(job)
        if supervisor is not None:
            for pid in [*([supervisor.pid] if supervisor.alive() else []), *of_job(job)]:
                with contextlib.suppress(ProcessLookupError):  # it was about to end
                    os.kill(pid, signal.SIGKILL)


def supervisor_of(job: Job) -> Identity | None:
    """The job's supervisor, also where a test has written that it is elsewhere."""
    found = JobFiles(job.record.directory).supervisor()
    return found and Identity(found.pid, found.started)


def identities(job: Job) -> dict[str, Identity]:
    """The supervisor and the launcher of a job that runs."""
    supervisor = supervisor_of(job)
    assert supervisor is not None
    (launcher,) = (child for child in psutil.Process(supervisor.pid).children() if "launch" in child.cmdline())
    identity = Identity.of(launcher.pid)
    assert identity is not None
    return {"supervisor": supervisor, "launcher": identity}


def until_printed(job: Job, text: str, times: int = 1) -> None:
    until(lambda: printed(job).count(text) >= times, f"{text!r} in the log of {job!r}, which holds {printed(job)!r}")


def printed(job: Job, *, ranks: bool = True) -> str:
    return "".join(line.text for line in job.logs() if (line.rank is not None) == ranks)


def of_job(job: Job) -> list[int]:
    """Every live process that was started with this job's id in its environment, but the supervisor."""
    pids, supervisor = [], supervisor_of(job)
    for process in psutil.process_iter():
        try:
            if process.environ().get("ACCEL_JOB_ID") == job.id and process.status() != psutil.STATUS_ZOMBIE:
                if supervisor is not None and process.pid == supervisor.pid:
                    continue
                pids.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return pids
