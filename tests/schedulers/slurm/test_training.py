"""Training on a real cluster: what it learns is what one machine learns, whatever becomes of its nodes meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, State, Status
from schedulers.job import Reason
from tests.clusters.slurm import Slurm
from tests.digits import SAME, write_in_float64
from tests.waiting import until

from .conftest import ROOT, Submit, printed
from .orphans import nothing_left

STEPS = 300
# In its first attempt, from the eighth step on, it takes its time: whatever happens to it, happens in its midst.
TRAIN = f"""\
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

folder, every = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(
    project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5, use_stateful_dataloader=True),
)
set_seed(1, device_specific=True)
data = TensorDataset(torch.linspace(-1, 1, 80).reshape(40, 2), torch.linspace(0, 1, 40)[:, None])
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if os.path.isdir(os.path.join(folder, "checkpoints")):
    accelerator.load_state("latest")
step = loader.iteration * len(loader) + loader.position
for _ in range(loader.iteration, {STEPS} // len(loader)):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, loss.item().hex(), flush=True)
        step += 1
        if every and step % every == 0:
            accelerator.save_state()
        accelerator.checkpoint_on_preemption()
        if os.environ.get("ACCEL_ATTEMPT") == "0" and step > 7:
            time.sleep(0.25)
accelerator.end_training()
"""
LOSS = re.compile(r"step (\d+) (\S+)")

Train = Callable[..., Job]
Losses = dict[int, str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Losses]:
    """The losses of both ranks in a run that nothing happens to, on this machine."""
    here = tmp_path_factory.mktemp("alone")
    (here / "train.py").write_text(TRAIN)
    words = ["launch", "--cpu", "--num_processes", "2", "--log_dir", "logs", "train.py", "run", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "accel", *words], cwd=here, env=env, check=True)
    found = [_losses((here / f"logs/rank-{rank}.a0.log").read_text()) for rank in range(2)]
    assert [len(losses) for losses in found] == [STEPS, STEPS]
    return found


@pytest.fixture
def train(slurm: Slurm, home: Path, project: Path) -> Train:
    """Submits TRAIN: two ranks, on as many nodes as are asked for."""
    (project / "train.py").write_text(TRAIN)

    def train(*, nodes: int, every: int = 0, options: dict[str, Any] | None = None, **given: Any) -> Job:
        return schedulers.submit(
            "train.py", ["run", str(every)], cwd=project, target="slurm", nodes=nodes, procs_per_node=2 // nodes,
            cpus=2 // nodes, options={"cpu": True, **(options or {})}, **given,
        )  # fmt: skip

    return train


def _losses(text: str) -> Losses:
    return {int(step): loss for step, loss in LOSS.findall(text)}


def _attempts(job: Job, rank: int) -> list[Losses]:
    """The losses that the rank has printed, by attempt."""
    texts: dict[int, str] = {}
    for line in job.logs(ranks=[rank]):
        texts[line.attempt] = texts.get(line.attempt, "") + line.text
    return [_losses(texts[attempt]) for attempt in sorted(texts)]


def _is_at(job: Job, step: int) -> bool:
    return all(f"step {step} " in "".join(line.text for line in job.logs(ranks=[rank])) for rank in range(2))


def _slurm_id(job: Job) -> str:
    return str(job.native_id).partition("/")[0]


def _went_on(job: Job, whole: list[Losses], slurm: Slurm, *, repeated: int = 0) -> Status:
    """It ended well, as the same job of Slurm's, and every loss is that of the whole run, to the bit. Of a run that
    was warned no step is done twice."""
    before = job.native_id
    status = job.wait(300)
    assert status.state is State.SUCCEEDED, (status, "".join(line.text for line in job.logs()))
    assert job.native_id == before
    assert status.attempt >= 1
    for rank in range(2):
        attempts = _attempts(job, rank)
        assert len(attempts) == status.attempt + 1
        assert all(whole[rank][step] == loss for losses in attempts for step, loss in losses.items())
        assert {step for losses in attempts for step in losses} == set(whole[rank])
        assert min(attempts[-1]) > 7
        assert sum(map(len, attempts)) - STEPS <= repeated
    nothing_left(slurm, job)
    return status


@pytest.fixture
def misnamed(slurm: Slurm) -> Iterator[list[str]]:
    """Nodes whose own names mean themselves alone: gloo would listen there."""
    names = ["n1", "n2"]
    for name in names:
        slurm[name].own_name("127.0.1.1")
    yield names
    for name in names:
        slurm[name].run("umount", "/etc/hosts")


@pytest.mark.long  # the other tests here train on two nodes
def test_digits_on_two_nodes_of_two_ranks(slurm: Slurm, misnamed: list[str], home: Path, project: Path) -> None:
    script, words = write_in_float64(project), ["--epochs", "2", "--losses"]
    job = schedulers.submit(
        script, [*words, "many.json"], cwd=project, target="slurm", nodes=2, procs_per_node=2, cpus=2,
        options={"cpu": True, "nodelist": ",".join(misnamed)},
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    one = [sys.executable, str(script), *words, "one.json"]
    alone = subprocess.run(one, cwd=project, env=env, capture_output=True, text=True, check=True)
    status = job.wait(300)
    assert status.state is State.SUCCEEDED, (status, printed(job))
    many, few = (json.loads((project / name).read_text()) for name in ("many.json", "one.json"))
    assert many == pytest.approx(few, abs=SAME)
    texts = ("".join(line.text for line in job.logs(ranks=[0])), alone.stdout)
    found = [float(text.rpartition("test accuracy: ")[2]) for text in texts]
    assert found[0] == found[1]
    assert found[0] > 0.8
    nothing_left(slurm, job)


def test_preempted_by_a_job_of_higher_priority(train: Train, whole: list[Losses], slurm: Slurm) -> None:
    options = {"exclusive": True, "nodelist": "n1,n2"}
    job = train(nodes=2, max_restarts=2, options=options)
    until(lambda: _is_at(job, 7), "it trains")
    other = ["sbatch", "-p", "high", "-N2", "-w", "n1,n2", "--exclusive", "-o", "/dev/null", "--wrap", "srun true"]
    slurm.run(other)
    _went_on(job, whole, slurm)


@pytest.mark.long
def test_warned_by_hand(train: Train, whole: list[Losses], slurm: Slurm) -> None:
    job = train(nodes=1, max_restarts=1)
    until(lambda: _is_at(job, 7), "it trains")
    slurm.run(["scancel", "--signal=USR1", _slurm_id(job)])
    assert _went_on(job, whole, slurm).attempt == 1


@pytest.mark.long
def test_its_time_limit_passes(train: Train, whole: list[Losses], slurm: Slurm) -> None:
    job = train(nodes=1, max_restarts=3, time_limit_s=60, grace_s=35)
    _went_on(job, whole, slurm)


@pytest.mark.long
def test_a_node_is_lost(train: Train, whole: list[Losses], slurm: Slurm) -> None:
    """Nobody was warned: it goes on from the last checkpoint, on another node."""
    job = train(nodes=2, every=10, max_restarts=1)
    until(lambda: _is_at(job, 23), "it has left checkpoints")
    first = json.loads((job.record.directory / "slurm/attempts.jsonl").read_text())
    slurm.kill_node(first["nodes"][1])
    assert _went_on(job, whole, slurm, repeated=STEPS).attempt == 1
    second = json.loads((job.record.directory / "slurm/attempts.jsonl").read_text().splitlines()[1])
    assert first["nodes"][1] not in second["nodes"]
    assert min(_attempts(job, 0)[1]) >= 20


def test_a_script_that_does_not_heed_the_warning(submit: Submit, slurm: Slurm) -> None:
    """It is ended in order, and what would have helped is said."""
    options = {"exclusive": True, "nodelist": "n1"}
    job = submit("trap 'echo in order; exit 0' TERM; echo go; while :; do sleep 0.05; done", options=options)
    until(lambda: "go\n" in printed(job), "it runs")
    slurm.run(["sbatch", "-p", "high", "-w", "n1", "--exclusive", "-o", "/dev/null", "--wrap", "srun true"])
    status = job.wait(120)
    assert (status.state, status.reason) == (State.FAILED, Reason.PREEMPTED), status
    assert "in order\n" in printed(job)
    assert "accelerator.checkpoint_on_preemption()" in status.message
    assert "--max-restarts" in status.message
    nothing_left(slurm, job)


def test_a_function_on_two_nodes(slurm: Slurm, home: Path, project: Path) -> None:
    def place(number: int) -> tuple[int, ...]:
        return number, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    settings: dict[str, Any] = {"procs_per_node": 1, "cpus": 1, "options": {"cpu": True}, "cwd": project}
    job = schedulers.submit(place, args=(3,), target="slurm", nodes=2, **settings)
    assert job.result(120) == (3, 0, 2)
    nothing_left(slurm, job)
