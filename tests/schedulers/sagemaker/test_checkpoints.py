"""Checkpoints on instances that have nothing in common but a prefix in S3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import schedulers
from schedulers import State
from tests.clusters.sagemaker import SageMaker
from tests.waiting import until

from .conftest import target_options

# Written as for any other cluster. On its first start it stops after two epochs until it is told to go on, saves two
# more, and then waits for the interruption.
SCRIPT = """\
import os, sys, time
import torch
from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed
from accel.errors import CheckpointError

accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=3),
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=4),
)
set_seed(3, device_specific=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.linspace(-1, 1, 64).reshape(16, 4), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = "--whole" not in sys.argv
try:
    accelerator.load_state("latest")
    first = False
except CheckpointError as error:
    accelerator.print(error)
for epoch in range(loader.iteration, 6):
    if first and epoch == 2:
        while not os.path.exists("/opt/ml/go"):
            time.sleep(0.05)
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print("loss", epoch, float(loss).hex(), flush=True)
    accelerator.save_state()
    print("saved", epoch, flush=True)
    if first and epoch == 3:
        time.sleep(600)
accelerator.end_training()
"""


def losses(lines: list[str]) -> dict[str, set[str]]:
    """Epoch -> the losses that were printed for it."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("loss "):
            _, epoch, loss = line.split()
            found.setdefault(epoch, set()).add(loss)
    return found


def uninterrupted(project: Path, directory: Path) -> dict[str, set[str]]:
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*argv, project / "train.py", "--whole"], cwd=directory, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses([line[line.find("loss ") :] for line in done.stdout.splitlines() if "loss " in line])


def test_an_interruption_while_checkpoints_are_copied_resumes_to_the_bit(
    sagemaker: SageMaker, home: Path, project: Path, tmp_path: Path
) -> None:
    """Of the two newest checkpoints only some files, of some instances, have reached S3."""
    (project / "train.py").write_text(SCRIPT)
    spot = {
        "enable_managed_spot_training": True, "max_wait_time_in_seconds": 600,
        "checkpoint_s3_uri": f"s3://{sagemaker.bucket}/kept/{{id}}",
    }  # fmt: skip
    job = schedulers.submit(
        "train.py", target="sagemaker", nodes=2, procs_per_node=1, time_limit_s=600.0, cwd=project,
        env={"OMP_NUM_THREADS": "1"}, options=target_options(sagemaker, **spot),
    )  # fmt: skip
    name = str(job.native_id).split("/")[1]
    s3 = sagemaker.client("s3")

    def copied() -> set[str]:
        found = s3.list_objects_v2(Bucket=sagemaker.bucket, Prefix=f"kept/{job.id}/").get("Contents") or []
        return {each["Key"].split("/", 2)[2] for each in found}

    def arrived() -> bool:
        assert not job.status().state.final, (job.status(), list(job.logs()), sagemaker.diagnose())
        if {line.rank for line in job.logs() if line.text == "saved 1\n"} != {0, 1}:
            return False
        find = ("find", "/opt/ml/checkpoints", "-type", "f", "-printf", r"%P\n")
        return copied() >= {path for host in ("algo-1", "algo-2") for path in sagemaker.run(name, host, *find).split()}

    until(arrived, "two checkpoints are whole in S3")
    sagemaker.hold_checkpoints(name)
    for host in ("algo-1", "algo-2"):
        sagemaker.run(name, host, "touch", "/opt/ml/go")

    def saved() -> bool:
        assert not job.status().state.final, (job.status(), list(job.logs()), sagemaker.diagnose())
        return {line.rank for line in job.logs() if line.text == "saved 3\n"} == {0, 1}

    until(saved, "two more are saved")
    sagemaker.interrupt(name, files=4, warn=False)
    status = job.wait(240)
    lines = list(job.logs())
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), (status, lines, sagemaker.diagnose())
    assert any("skipped: " in line.text for line in lines), lines
    again = [line.text for line in lines if line.rank == 0 and line.attempt == 1 and line.text.startswith("loss")]
    assert [line.split()[1] for line in again] == ["2", "3", "4", "5"]
    for rank in (0, 1):
        mine = losses([line.text for line in lines if line.rank == rank])
        assert all(len(found) == 1 for found in mine.values()), mine  # what was repeated is the same
    assert losses([line.text for line in lines if line.rank is not None]) == uninterrupted(project, tmp_path)
