"""Forms a world; in the first start its last rank kills itself, in the second all write down when they were back."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
rank = dist.get_rank()
if FIRST and rank == dist.get_world_size() - 1:
    with open(os.path.join(sys.argv[1], "died"), "w") as file:
        file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
if FIRST:
    signal.pause()
with open(os.path.join(sys.argv[1], f"{rank}"), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
