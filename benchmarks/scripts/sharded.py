"""Sharded training by `fully_shard`: by hand, with accel and with Accelerate, in turns, in each process of a world.

A step with its clipping; `prepare`; a checkpoint beside `torch.distributed.checkpoint` of the same state; and what
loading a model on the main process alone costs the others in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from accel import Accelerator, FullyShardedDataParallelPlugin
from benchmarks.scripts.rounds import shortest_steps, write

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "8"))
WIDTH, DEPTH, ROWS, LENGTH = 256, 4, 4, 64
BIG = 16  # blocks of 64 MB
BATCH = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
CLIP = 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.norm(hidden)
        hidden = hidden + self.attention(seen, seen, seen, need_weights=False)[0]
        more: torch.Tensor = self.down(nn.functional.gelu(self.up(hidden)))
        return hidden + more


class Model(nn.Module):
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.norm(hidden)
        return output


def made(width: int = WIDTH, depth: int = DEPTH) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(width, depth)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def by_hand(width: int = WIDTH, depth: int = DEPTH) -> tuple[Any, Any]:
    """As a careful script does it: the main process's weights, units, and an optimizer of the shards."""
    torch.manual_seed(0)
    model = Model(width, depth)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def accelerates() -> Any:
    """Accelerate's own, which shards no model on a CPU unless its state is told so."""
    from accelerate import Accelerator as Theirs
    from accelerate import FullyShardedDataParallelPlugin as Plugin
    from accelerate.utils import DistributedType

    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):  # which ours has set, for transformers
        os.environ.pop(name, None)
    accelerator = Theirs(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = Plugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    assert accelerator.is_fsdp2
    return accelerator


def training_step(model: Any, optimizer: Any, accelerator: Any = None) -> Callable[[], None]:
    """Return a step with its clipping; by hand without ``accelerator``."""
    backward = accelerator.backward if accelerator else torch.Tensor.backward
    clip = accelerator.clip_grad_norm_ if accelerator else nn.utils.clip_grad_norm_

    def step() -> None:
        backward(model(BATCH).square().mean())
        clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared(accelerator: Any) -> Callable[[], None]:
    model, optimizer = accelerator.prepare(*made())
    return training_step(model, optimizer, accelerator)


def steps(ours: Any) -> dict[str, list[float]]:
    theirs = accelerates()
    return shortest_steps(
        {
            "shortest step, by hand": training_step(*by_hand()),
            "shortest step, accel": prepared(ours),
            "shortest step, accelerate": prepared(theirs),
        },
        ROUNDS,
    )


def preparing(ours: Any) -> dict[str, list[float]]:
    calls = {"prepare, by hand": lambda: by_hand(512, 6), "prepare, accel": lambda: ours.prepare(*made(512, 6))}
    return _timed(calls, lambda name: ours.free_memory())


def checkpoints(ours: Any) -> dict[str, list[float]]:
    """The same 38 million weights and their moments, 450 MB, by both."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    ours.free_memory()
    model, optimizer = ours.prepare(*made(512, 12))
    ours.backward(model(torch.randn(2, 4, 512)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer.optimizer)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))

    def fresh(place: Path) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            os.sync()

    try:
        return _timed(
            {
                "save, dcp": lambda: save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp"),
                "save, accel": lambda: ours.save_state(folder / "accel"),
            },
            lambda name: fresh(folder / name.rpartition(" ")[2]),
        ) | _timed(
            {
                "load, dcp": lambda: load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp"),
                "load, accel": lambda: ours.load_state(folder / "accel"),
            }
        )
    finally:
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def _timed(
    calls: dict[str, Callable[[], Any]], before: Callable[[str], None] = lambda name: None
) -> dict[str, list[float]]:
    """Seconds of each call in each round, from a moment at which all processes are to one at which all have ended."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-1, ROUNDS):
        for name in sorted(calls, reverse=bool(number % 2)):
            before(name)
            dist.barrier()
            started = time.perf_counter()
            calls[name]()
            dist.barrier()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory(ours: Any) -> dict[str, list[float]]:
    """What a model of 1 GB, read by the main process alone, adds to the peak of another process until it is sharded."""
    ours.free_memory()
    width = 1152
    with torch.device("cpu" if ours.is_main_process else "meta"):
        model = Model(width, BIG)
    largest = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    whole = sum(p.numel() * 4 for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model = ours.prepare(model)
    grown = [peak() - before]
    dist.broadcast_object_list(grown, src=dist.get_world_size() - 1)
    allowed = whole / dist.get_world_size() + 2 * largest
    return {"GB more on another process": [grown[0] / 1e9], "GB of its share and two units": [allowed / 1e9]}


def main() -> None:
    torch.set_num_threads(1)
    ours = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True))
    found = memory(ours) | preparing(ours) | checkpoints(ours)
    ours.free_memory()
    found |= steps(ours)
    write(found)
    ours.end_training()


if __name__ == "__main__":
    main()
