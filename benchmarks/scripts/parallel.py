"""Split layers (`BENCHMARK_KIND=TP 2`) or split sequences (`CP 2`) in a world of two: by hand and with accel, in turns.

By hand means torch's own APIs: `parallelize_module`, and for sequences `DistributedDataParallel` over a model whose
attention gathers keys and values by a functional collective. torch's `context_parallel` has no kernel for the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import gelu

from accel import Accelerator, ParallelismConfig
from benchmarks.scripts.rounds import shortest_steps, write

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "8"))
WIDTH, HEADS, DEPTH, ROWS, LENGTH = 256, 4, 4, 4, 128
TORCH = {"attention": torch.nn.functional.scaled_dot_product_attention}  # in a place where accel does not replace it
COLWISE, ROWWISE = ("query", "key", "value", "up"), ("out", "down")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without weights: all parameters are split then, as torch's clipping by hand needs.
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attend: Callable[..., torch.Tensor] | None = None  # by hand; else torch's function, which accel replaces

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen = self.norm(hidden)
        parts = [
            layer(seen).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attention = self.attend or torch.nn.functional.scaled_dot_product_attention
        attended = attention(parts[0], parts[1], parts[2], is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended)
        more: torch.Tensor = self.down(gelu(self.up(hidden)))
        return hidden + more


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.tp_plan = {f"blocks.*.{name}": "colwise" for name in COLWISE}
        self.tp_plan |= {f"blocks.*.{name}": "rowwise" for name in ROWWISE}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Training:
    """A model, its optimizer and a batch; by hand here."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.batch = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(self) -> None:
        self.backward(self.batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()


class SplitLayers(Training):
    """By hand: the main process's weights, the plan in torch's styles, and an optimizer of the parts."""

    def __init__(self) -> None:
        model: Any = made()[0]
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
        mesh = init_device_mesh("cpu", (2,))
        styles: dict[str, Any] = {name: ColwiseParallel() for name in COLWISE} | {
            name: RowwiseParallel() for name in ROWWISE
        }
        for block in model.blocks:
            parallelize_module(block, mesh, styles)
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


class SplitSequences(Training):
    """By hand: a head and a tail chunk for each process, keys and values gathered, gradients averaged by DDP."""

    def __init__(self) -> None:
        model, optimizer = made()
        for block in model.blocks:
            vars(block)["attend"] = self.attend
        super().__init__(nn.parallel.DistributedDataParallel(model), optimizer)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group: Any = dist.group.WORLD

    def backward(self, batch: torch.Tensor) -> None:
        # accel's first block has replaced the function, which its own step sets again.
        torch.nn.functional.scaled_dot_product_attention = TORCH["attention"]
        chunks = batch.chunk(2 * self.size, 1)
        super().backward(torch.cat([chunks[self.rank], chunks[-1 - self.rank]], 1))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = all_gather_tensor_autograd(part.contiguous(), 0, self.group).chunk(self.size)
        heads, tails = zip(*(own.chunk(2, -2) for own in parts), strict=True)
        return torch.cat([*heads, *reversed(tails)], -2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        key, value, chunk = self.gather(key), self.gather(value), query.shape[-2] // 2
        ends = (self.rank + 1) * chunk, (2 * self.size - self.rank) * chunk
        return torch.cat(
            [
                TORCH["attention"](part, key[..., :end, :], value[..., :end, :], causal_lower_right(chunk, end))
                for part, end in zip(query.chunk(2, -2), ends, strict=True)
            ],
            -2,
        )


class Ours(Training):
    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(*accelerator.prepare(*made()))
        self.accelerator = accelerator

    def step(self) -> None:
        with self.accelerator.maybe_context_parallel([self.batch], [1]):
            self.accelerator.backward(self.model(self.batch).square().mean())
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    kind = os.environ["BENCHMARK_KIND"]
    config = ParallelismConfig(tp_size=2) if kind == "TP 2" else ParallelismConfig(cp_size=2)
    accelerator = Accelerator(parallelism_config=config)
    by_hand = SplitLayers() if kind == "TP 2" else SplitSequences()
    write(shortest_steps({f"{kind}, by hand": by_hand.step, f"{kind}, accel": Ours(accelerator).step}, ROUNDS))
    accelerator.end_training()


if __name__ == "__main__":
    main()
