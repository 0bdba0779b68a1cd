"""Forms a world, reduces one number over it, and writes down when this rank was done."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
assert number.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
with open(os.path.join(sys.argv[1], f"{dist.get_rank()}"), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
