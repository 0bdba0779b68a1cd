"""Small models with what is hard about large ones: ties, buffers of both kinds, parameters between blocks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    """Two linear maps, a buffer that is saved and one that is not."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("shift", torch.rand(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x))) * self.scale + self.shift
        return out


class Tower(nn.Module):
    """Tokens in, scores of tokens out; the embedding and the head are one weight, and the top has a parameter."""

    def __init__(self, width: int = 6, depth: int = 3, tokens: int = 11) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width))
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, times: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embed(tokens) * self.gain
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        if times is not None:
            hidden = hidden * times
        return {"scores": self.head(hidden)}


def tower(seed: int = 0, **shape: Any) -> Tower:
    torch.manual_seed(seed)
    return Tower(**shape).eval()


TOKENS = torch.tensor([1, 5, 9, 0])


def scores(model: nn.Module, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(TOKENS, **more)["scores"]
    return out


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def addresses(model: nn.Module) -> dict[str, torch.device]:
    """Where each parameter and buffer is."""
    return {
        name: tensor.device
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
