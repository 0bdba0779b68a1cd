"""`accel` on the login node of a real cluster."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.clusters.fixtures import _without_accounting
from tests.clusters.slurm import Slurm
from tests.schedulers.slurm.conftest import slurm

from .conftest import Accel

__all__ = ["_without_accounting", "slurm"]

Run = Callable[..., str]


@pytest.fixture
def run(accel: Accel, slurm: Slurm) -> Run:
    """What `accel argv` prints there, after checking its exit code."""

    def run(*argv: str, code: int = 0) -> str:
        return accel(*argv, code=code, SLURM_CONF=os.environ["SLURM_CONF"])

    return run


@pytest.fixture(autouse=True)
def _nothing_left(accel: Accel, slurm: Slurm) -> None:
    """The fixture `accel` cancels what is left: it must find the cluster then."""
    (accel.here / "accel.yaml").write_text("targets:\n  lab:\n    kind: slurm\n    cpu: true\n")


def test_a_script_is_followed_to_its_end(run: Run, accel: Accel) -> None:
    script = accel.script("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:]); sys.exit(3)")
    words = ["--target", "lab", "--cpus", "1", "--procs-per-node", "1", "--name", "it's; $(x)"]
    output = run("submit", *words, "--follow", script, "a b", "$(y)", code=3)
    assert "rank 0 ['a b', '$(y)']\n" in output
    (job,) = json.loads(run("list", "--json"))["jobs"]
    assert (job["name"], job["state"], job["target"]) == ("it's; $(x)", "failed", "lab")


def test_the_reason_why_it_waits_is_said(run: Run) -> None:
    job = run("submit", "--target", "lab", "--cpus", "1", "--nodes", "9", "--no-python", "true").strip()
    found = run("status", job)
    assert "queued" in found
    assert "its partition" in found  # PartitionConfig, or PartitionNodeLimit
    assert "its partition" in run("list")
    run("cancel", job)
    assert '"cancelled"' in run("status", "--json", job)


def test_wrong_options_are_refused_before_sbatch(run: Run, accel: Accel) -> None:
    for option, said in {
        "partitoin=main": "partition",
        'sbatch={"licences": "a"}': "licenses",
        'sbatch={"comment": "a"}': "accel sets 'comment' itself",
    }.items():
        words = ["submit", "--target", "lab", "--option", option, "--no-python", "true"]
        done = accel.finish(*words, SLURM_CONF=os.environ["SLURM_CONF"])
        lines = done.stderr.decode().strip().splitlines()
        assert done.returncode != 0
        assert len(lines) == 1
        assert said in lines[0]
    assert json.loads(run("list", "--all", "--json"))["jobs"] == []


def test_a_refusal_of_slurm_is_one_line(run: Run, accel: Accel) -> None:
    words = ["submit", "--target", "lab", "--cpus", "1", "--option", "partition=nowhere", "--no-python", "true"]
    done = accel.finish(*words, SLURM_CONF=os.environ["SLURM_CONF"])
    assert done.returncode != 0
    (line,) = done.stderr.decode().strip().splitlines()
    assert "Invalid partition name specified" in line


def test_the_dry_run_asks_nobody(accel: Accel) -> None:
    shown = accel("submit", "--dry-run", "--target", "lab", "--cpus", "2", "--no-python", "true", SLURM_CONF="/nowhere")
    assert "#SBATCH --comment=accel:dry-run\n" in shown
    assert "#SBATCH --cpus-per-task=2\n" in shown
    assert "\n$ sbatch " in shown


def test_a_sweep(run: Run) -> None:
    words = ["--target", "lab", "--cpus", "1", "--procs-per-node", "1", "--sweep", "lr=1,2,3"]
    ids = run("submit", *words, "--no-python", "echo", "rate", "{lr}").split()
    assert len(ids) == 3
    for job, rate in zip(ids, "123", strict=True):
        run("wait", job)
        assert f"rate {rate}\n" in run("logs", job)


def test_the_cluster_is_examined(run: Run) -> None:
    assert "small" in run("targets", "check", "lab")
    run("targets", "check", "lab", "--gpus", "8", code=1)


def test_a_controller_that_is_down(run: Run, slurm: Slurm, accel: Accel) -> None:
    job = run("submit", "--target", "lab", "--cpus", "1", "--nodes", "9", "--no-python", "true").strip()
    slurm.kill_controller()
    done = accel.finish("status", job, SLURM_CONF=os.environ["SLURM_CONF"])
    assert re.search(rb"squeue(: | did not respond)", done.stderr + done.stdout)
    assert b"queued" in done.stdout
    slurm.start_controller()


def test_whoever_follows_is_told_why_it_waits(run: Run, accel: Accel) -> None:
    words = ["--target", "lab", "--cpus", "1", "--nodes", "9", "--follow", "--no-python", "true"]
    with accel.start("submit", *words, SLURM_CONF=os.environ["SLURM_CONF"]) as follower:
        assert follower.stderr is not None
        lines = iter(follower.stderr.readline, b"")
        assert any(b"is queued: it requests more nodes than its partition allows" in line for line in lines)
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130
