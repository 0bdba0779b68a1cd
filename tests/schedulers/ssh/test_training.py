"""What the ssh target is for: training on four hosts, and hosts that are lost in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State
from tests.clusters.ssh import SshHosts
from tests.digits import DIGITS, SAME, write_in_float64
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, job_files, nothing_is_left, printed

WAIT = 'echo "rank $RANK on $(hostname) in $ACCEL_ATTEMPT"; sleep 300'
EPOCHS = ("--epochs", "2")
# In its first attempt it takes its time once there is a checkpoint: what happens to it then happens in its midst.
SLOWLY = f"""
import os, runpy, sys, time
import torch
from accel import Accelerator
torch.set_default_dtype(torch.float64)
sys.argv[0] = {str(DIGITS)!r}
kept = sys.argv[sys.argv.index("--checkpoint-dir") + 1]
backward = Accelerator.backward
def slowly(self, loss, **kwargs):
    time.sleep(0.5 * (os.path.exists(kept) and os.environ["ACCEL_ATTEMPT"] == "0"))
    backward(self, loss, **kwargs)
Accelerator.backward = slowly
if os.path.exists(kept):
    sys.argv.append("--resume")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process on this computer."""
    directory = tmp_path_factory.mktemp("alone")
    script, losses = write_in_float64(directory), directory / "losses.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, script, *EPOCHS, "--losses", losses], env=env, timeout=300, check=True)
    found: list[float] = json.loads(losses.read_text())
    assert len(found) > 20
    return found


def training(hosts: SshHosts, script: Path, *words: str, **given: Any) -> Job:
    options = host_options(hosts) | {"start_timeout_s": 60} | given.pop("options")
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return schedulers.submit(
        script, (*EPOCHS, *words), target="ssh", procs_per_node=1, cwd=script.parent, env=env, options=options,
        grace_s=2.0, **given,
    )  # fmt: skip


@pytest.mark.long
def test_four_hosts_train_as_one_process_does(
    ssh_hosts: SshHosts, home: Path, project: Path, tmp_path: Path, alone: list[float]
) -> None:
    """On hosts whose own names mean themselves alone: gloo would listen there."""
    for machine in ssh_hosts.machines:
        machine.own_name("127.0.1.1")
    losses = tmp_path / "four.json"
    options = {"hosts": "node[1-4]", "heartbeat_s": 30}
    job = training(ssh_hosts, write_in_float64(project), "--losses", str(losses), nodes=4, options=options)
    try:
        assert job.wait(300).state is State.SUCCEEDED, [line.text for line in job.logs()]
        assert json.loads(losses.read_text()) == pytest.approx(alone, abs=SAME)
        nothing_is_left(ssh_hosts)
    finally:
        close(job)
        for machine in ssh_hosts.machines:
            machine.kill()


@pytest.mark.long
def test_the_gang_goes_on_from_its_checkpoint_on_a_spare(
    submit: Submit, ssh_hosts: SshHosts, project: Path, tmp_path: Path, alone: list[float]
) -> None:
    """The checkpoint is where all hosts see it."""
    (project / "train.py").write_text(SLOWLY)
    kept, losses = tmp_path / "checkpoint", tmp_path / "losses.json"
    words = ("--checkpoint-dir", str(kept), "--losses", str(losses))
    options = {"hosts": "node[1-3]", "spares": 1}
    job = training(ssh_hosts, project / "train.py", *words, nodes=2, options=options, max_restarts=1)
    until(kept.exists, "there is a checkpoint")
    ssh_hosts["node2"].kill()
    status = job.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), (status, [line.text for line in job.logs()])
    epochs = {(line.attempt, line.text[:9]) for line in job.logs() if line.text.startswith("epoch ")}
    assert epochs == {(0, "epoch 1/2"), (1, "epoch 2/2")}
    assert json.loads(losses.read_text()) == pytest.approx(alone, abs=SAME)
    assert (job_files(ssh_hosts, "node3", job.id) / "logs/rank-1.a1.log").exists()
    nothing_is_left(ssh_hosts)
    close(job)


def test_a_host_that_is_cut_off_ends_its_own_ranks(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(WAIT)
    until(lambda: printed(job).count(" in 0\n") == 2, "both ranks run")
    ssh_hosts["node2"].link(False)
    status = job.wait(90)
    assert (status.state, status.reason) == (State.FAILED, Reason.NODE_FAILURE), status
    assert "node2" in status.message
    running: Any = ssh_hosts["node2"].run
    until(lambda: f"ACCEL_JOB_ID={job.id}" not in running("sh", "-c", "cat /proc/[0-9]*/environ || :"), "no orphan")
    ssh_hosts["node2"].link(True)
    assert job.status().reason is Reason.NODE_FAILURE
    nothing_is_left(ssh_hosts)
