"""Layers that compute as torch's do, and an autocast that records how it was entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

entered: list[tuple[bool, Any]] = []  # whether 8 bits were on, and the recipe
_on = False


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True, params_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=params_dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=params_dtype)) if bias else None
        self.calls: list[bool] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(_on)
        return nn.functional.linear(inputs, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    def __init__(self, size: int, eps: float = 1e-5, params_dtype: torch.dtype | None = None) -> None:
        super().__init__(size, eps=eps, dtype=params_dtype)


class TransformerLayer(nn.Module):
    pass


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
    global _on
    entered.append((enabled, fp8_recipe))
    _on = enabled
    try:
        yield
    finally:
        _on = False
