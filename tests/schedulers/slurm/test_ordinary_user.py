"""A user who is not root on the machines of a cluster: the jobs are theirs, from the submit to the prune."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ordinary
from tests.clusters.slurm import Slurm
from tests.clusters.slurm_files import WORKER_UID

from .conftest import ROOT

Accel = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def accel(slurm: Slurm, tmp_path: Path) -> Iterator[Accel]:
    """Runs `accel` on the login machine as its user `worker`, in that user's home."""
    ordinary.check(tmp_path, WORKER_UID)
    home = slurm.home("worker")
    env = {"HOME": str(home), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **slurm.env}
    words = ["env", "-C", str(home), *(f"{name}={value}" for name, value in env.items())]

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [*words, *ordinary.as_user(WORKER_UID), sys.executable, "-m", "accel", *argv]
        return subprocess.run(slurm.login.argv(*command), capture_output=True, text=True, timeout=180)

    opened = []
    try:
        for machine in (slurm.login, *slurm.nodes):
            machine.run("mkdir", str(tmp_path / machine.name))
            opened.append(machine)
            machine.run("sh", "-ec", ordinary.opening(tmp_path / machine.name))
        yield run
    finally:
        for machine in opened:
            machine.run("sh", "-c", ordinary.closing(tmp_path / machine.name))


def test_a_job_from_its_submit_to_its_end(accel: Accel, slurm: Slurm) -> None:
    job = "--target slurm --option cpu=true --cpus 1 --procs-per-node 1 --no-python".split()
    followed = accel("submit", "--follow", *job, "sh", "-c", "id -u; id -un")
    assert (followed.returncode, followed.stdout) == (0, f"{WORKER_UID}\nworker\n"), followed.stderr
    held = accel("submit", *job, "sleep", "1000").stdout.strip()
    assert accel("cancel", held).stdout == f"{held}\tcancelled\n"
    states = {line.split("\t")[2] for line in accel("list").stdout.splitlines()}
    assert states == {"succeeded", "cancelled"}
    store = slurm.home("worker") / ".local/share/accel"
    assert {path.lstat().st_uid for path in store.rglob("*")} == {WORKER_UID}
    assert len(accel("prune", "--keep", "0").stdout.split()) == 2
