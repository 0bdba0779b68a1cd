"""What the ssh target is for: training on four hosts, and hosts that are lost in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import schedulers
from schedulers import Reason, State
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, nothing_is_left, printed

WAIT = 'echo "rank $RANK on $(hostname) in $ACCEL_ATTEMPT"; test "$ACCEL_ATTEMPT" = 1 || sleep 300'


def test_four_hosts_train_as_one_process_does(ssh_hosts: SshHosts, home: Path, tmp_path: Path) -> None:
    train = "examples/digits/train.py"
    words = ("--epochs", "1", "--losses")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    alone = subprocess.run([sys.executable, ROOT / train, *words, tmp_path / "alone.json"], env=env, timeout=300)
    assert alone.returncode == 0
    job = schedulers.submit(
        ROOT / train,
        (*words, str(tmp_path / "four.json")),
        target="ssh",
        nodes=4,
        procs_per_node=1,
        cwd=ROOT / "examples",
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        options=host_options(ssh_hosts) | {"hosts": "node[1-4]", "start_timeout_s": 60, "heartbeat_s": 30},
    )
    assert job.wait(300).state is State.SUCCEEDED, [line.text for line in job.logs()]
    one, four = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "four.json"))
    assert len(four) > 10
    assert max(abs(a - b) for a, b in zip(one, four, strict=True)) <= 1e-5
    close(job)
    nothing_is_left(ssh_hosts)


def test_the_gang_starts_again_on_a_spare(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(WAIT, hosts="node[1-3]", options={"spares": 1}, max_restarts=1)
    until(lambda: printed(job).count(" in 0\n") == 2, "both ranks run")
    ssh_hosts["node2"].kill()
    status = job.wait(90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    again = {line.text for line in job.logs() if line.rank is not None and line.attempt == 1}
    assert again == {"rank 0 on node1 in 1\n", "rank 1 on node3 in 1\n"}
    nothing_is_left(ssh_hosts)


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
