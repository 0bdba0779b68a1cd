"""Slurm clusters for the tests that need one: mended between tests."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job
from tests.clusters.slurm import Slurm
from tests.waiting import until as until

ROOT = Path(__file__).parents[3]
Submit = Callable[..., Job]


@pytest.fixture
def slurm(_without_accounting: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """n1 … n4 and a login machine, idle and without jobs; sacct is off. This process is a client of the cluster."""
    yield from _healed(_without_accounting, monkeypatch)


@pytest.fixture
def slurm_accounting(_with_accounting: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """As `slurm`, and sacct works, and each node has two seeming GPUs, of type a100."""
    yield from _healed(_with_accounting, monkeypatch)


def _healed(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    try:
        yield cluster
    finally:
        cluster.heal()


@pytest.fixture
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # what is exported to jobs, and to the launchers on the nodes
    return home


@pytest.fixture
def submit(home: Path, project: Path) -> Submit:
    """Submits `script` (the text of a shell script) to the cluster that the test has."""
    numbers = itertools.count()

    def submit(text: str, args: tuple[str, ...] = (), **given: Any) -> Job:
        script = project / f"job {next(numbers)}.sh"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        options = {"cpu": True, **given.pop("options", {})}
        settings = {"entry": "command", "procs_per_node": 1, "cpus": 1, "grace_s": 2.0, "target": "slurm", **given}
        return schedulers.submit(f"./{script.name}", args, cwd=project, options=options, **settings)

    return submit


def printed(job: Job) -> str:
    return "".join(line.text for line in job.logs() if line.rank is not None)


class Calls:
    """Counts the calls of some commands: each is in the PATH as a script that notes the call and runs the real one.

    Jobs have this PATH too. What they call is not counted: a job may begin as soon as it is submitted.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        directory.mkdir()
        self._log = directory / "calls"
        for name in names:
            script = directory / name
            script.write_text(
                f'#!/bin/sh\n[ "$SLURM_JOB_ID" ] || echo {name} >> {shlex.quote(str(self._log))}\n'
                f'exec {shutil.which(name)} "$@"\n'
            )
            script.chmod(0o755)

    def taken(self) -> list[str]:
        """The commands since the last time."""
        found = self._log.read_text().split() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return found


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls(tmp_path / "bin", ("squeue", "sacct", "scancel", "sbatch", "scontrol"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return found


def is_saved(slurm: Slurm, job: Job) -> None:
    """Waits until the controller has saved the job as one that runs, which it does."""
    said = f"runs-{job.id}"
    slurm.run(["scontrol", "update", f"JobId={str(job.native_id).partition('/')[0]}", f"Comment={said}"])

    def saved() -> bool:
        try:
            return said.encode() in (slurm.box / "state/job_state").read_bytes()
        except FileNotFoundError:  # the moment at which a new one is put there
            return False

    until(saved, "the controller has saved the job")
