"""Jobs on the real local target, in a store of their own; nothing of them is left when a test ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import schedulers
from schedulers import Job
from schedulers.local.job_files import JobFiles
from schedulers.processes import Identity, descendants
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
        for process in identities(job).values():
            identity = Identity(process.pid, process.started)  # wherever a test has said that it is
            for pid in [*descendants(identity.pid), identity.pid] if identity.alive() else []:
                os.kill(pid, signal.SIGKILL)


def identities(job: Job) -> dict[str, Identity]:
    """The job's supervisor and launcher, as far as they have been started."""
    files = JobFiles(job.record.directory)
    found = {"supervisor": files.supervisor(), "launcher": files.launcher()}
    return {name: identity for name, identity in found.items() if identity is not None}


def until_printed(job: Job, text: str, times: int = 1) -> None:
    until(lambda: printed(job).count(text) >= times, f"{text!r} in the log of {job!r}, which holds {printed(job)!r}")


def printed(job: Job, *, ranks: bool = True) -> str:
    return "".join(line.text for line in job.logs() if (line.rank is not None) == ranks)


def of_job(job: Job) -> list[int]:
    """Every live process that was started with this job's id in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ACCEL_JOB_ID") == job.id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found
