"""`preempted.py STAMPS`: trains a little until it is ended from outside, and writes down when each of its runs had done
its first step. The second run is as short as that."""

import os
import sys
import time

import torch

from accel import Accelerator, ProjectConfiguration

stamps = sys.argv[1]
run = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
accelerator = Accelerator(
    cpu=True, project_config=ProjectConfiguration(project_dir=f"{stamps}/run", automatic_checkpoint_naming=True)
)
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
if run:
    accelerator.load_state()
else:
    accelerator.save_state()
for step in range(1_000_000):
    loss = model(torch.ones(8, 64)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if not step:
        partial = f"{stamps}/.{accelerator.process_index}"
        with open(partial, "w") as file:
            file.write(repr(time.time()))
        os.rename(partial, f"{stamps}/{run}-{accelerator.process_index}")
    if run:
        break
    accelerator.checkpoint_on_preemption()
    time.sleep(0.01)
accelerator.end_training()
