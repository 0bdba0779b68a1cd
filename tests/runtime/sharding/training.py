"""A tiny decoder and a training loop, the same on any number of processes: what they see together is one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accel import Accelerator

WIDTH, WORDS, LENGTH, BATCH = 16, 32, 6, 12  # every world has as many rows a process


class Block(nn.Module):
    """Attention-free: a causal mean, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
        seen = self.norm(hidden).cumsum(1) / counts
        added: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(seen)))
        return hidden + added


class Decoder(nn.Module):
    """Tied weights, a parameter on the model itself, an odd number of rows, and a buffer."""

    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + 1, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = (self.embed(words) + self.position) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def decoder(seed: int = 0, **how: Any) -> Decoder:
    """The same on every process that gives the same seed; in float64, so that a wrong scale is no rounding error."""
    torch.manual_seed(seed)
    return Decoder(**how).double()


def batch(step: int, accelerator: Accelerator) -> torch.Tensor:
    """This process's rows of batch ``step``: all processes together have ``BATCH``."""
    rows = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    shares, place = accelerator.strategy.data_place
    return rows.chunk(shares)[place].to(accelerator.device)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean over this process's words; the mean of all processes' is that of the whole batch."""
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    steps: int = 10,
    clip: float | None = None,
    norm_type: float = 2.0,
    first: int = 0,
) -> tuple[list[float], list[float]]:
    """The loss of the whole batch at each step, and the norm of the gradients before they were clipped."""
    losses, norms = [], []
    for step in range(first, first + steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch(step, accelerator))
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip, norm_type).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms
