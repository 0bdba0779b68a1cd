"""A run that is warned, under `accel launch`: it saves at one step, says so, and goes on to the bit afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from accel.exit_codes import REQUEUE
from tests.marks import long

from .conftest import Launcher

TRAIN = """\
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


folder, wait = sys.argv[1], sys.argv[2:] == ["wait"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5, use_stateful_dataloader=True)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=3, dataloader_config=config, project_config=project
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
losses = open(os.path.join(folder, f"losses-{accelerator.process_index}"), "a")
done = 0
for _ in range(loader.iteration, 5):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item(), file=losses, flush=True)
        done += 1
        if wait and done == 7:
            print(f"rank {accelerator.process_index} is process {os.getpid()}.", flush=True)
            while not accelerator.preempted:  # which turns true on all at the same reading
                time.sleep(0.01)
        accelerator.checkpoint_on_preemption()
accelerator.end_training()
"""


def _losses(folder: Path, processes: int) -> list[list[str]]:
    return [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(processes)]


def _go(launcher: Launcher, name: str, processes: int) -> tuple[Path, tuple[str, ...]]:
    folder = launcher.here / name
    folder.mkdir()
    return folder, ("--cpu", "--num_processes", str(processes), "--log_dir", f"{name}/logs", "--tee", "3", "train.py")


TO_LAUNCHER = [(signal.SIGTERM, True), (signal.SIGUSR1, True)]


@pytest.mark.parametrize(
    ("processes", "ways"), [*long((1, TO_LAUNCHER[:1])), (2, [*TO_LAUNCHER, (signal.SIGTERM, False)])]
)
def test_a_warned_run_goes_on_to_the_bit(
    launcher: Launcher, processes: int, ways: list[tuple[signal.Signals, bool]]
) -> None:
    launcher.script(TRAIN)
    folder, argv = _go(launcher, "whole", processes)
    launcher(*argv, "whole")
    whole = _losses(folder, processes)
    assert {len(losses) for losses in whole} == {5 * -(-20 // processes)}
    for signum, to_launcher in ways:
        name = f"{signum.name}-{to_launcher}"
        folder, argv = _go(launcher, name, processes)
        run = launcher.start(*argv, name, "wait")
        run.says(*(f"rank {rank} is process" for rank in range(processes)))
        if to_launcher:
            run.send(signum)
        else:
            found = re.search(rf"rank {processes - 1} is process (\d+)", run.text())
            assert found
            os.kill(int(found[1]), signum)
        done = run.wait()
        assert done.code == REQUEUE, done
        assert "accel launch: preempted in attempt 0: the ranks were warned" in done.err
        events = [json.loads(line) for line in (folder / "logs/launch.jsonl").read_text().splitlines()]
        assert events[-1]["failure"]["reason"] == "preempted"
        part = _losses(folder, processes)
        assert {len(losses) for losses in part} == {7}
        launcher(*argv, name)
        assert _losses(folder, processes) == whole
    launcher.nothing_left()


def test_a_restart_that_was_asked_for_goes_on_at_once(launcher: Launcher) -> None:
    launcher.script(TRAIN)
    folder, argv = _go(launcher, "again", 2)
    run = launcher.start("--max_restarts", "1", *argv, "again", "wait")
    run.says("rank 0 is process", "rank 1 is process")
    run.send(signal.SIGUSR1)
    done = run.wait()
    assert done.code == 0, done
    assert [len(losses) for losses in _losses(folder, 2)] == [50, 50]
