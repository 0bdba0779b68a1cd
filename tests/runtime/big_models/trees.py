"""Random trees of modules, on the meta device, whose names never repeat."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.needs import package

package("hypothesis")

from hypothesis import strategies as st  # noqa: E402


class Block(nn.Module):
    """A module with children; the classes below differ in name alone."""


class Left(Block):
    pass


class Right(Block):
    pass


class Tall(Block):
    pass


BLOCKS = (Left, Right, Tall)


@dataclass
class _Maker:
    draw: Any
    shared: nn.Parameter | None
    names: Any = field(default_factory=lambda: itertools.count())
    sharing: int = 0

    def name(self) -> str:
        return f"m{next(self.names)}x"

    def leaf(self) -> nn.Module:
        kind = self.draw(st.sampled_from(["linear", "norm", "batch", "nothing", "tied", "embedding"]))
        width = self.draw(st.integers(1, 12))
        if kind == "tied" and self.shared is not None and self.sharing < 2:
            self.sharing += 1
            tied = nn.Linear(4, 4, bias=False)
            tied.weight = self.shared
            return tied
        if kind == "linear":
            return nn.Linear(width, self.draw(st.integers(1, 12)))
        if kind == "embedding":
            return nn.Embedding(width, 3)
        if kind == "norm":
            return nn.LayerNorm(width)
        return nn.Identity() if kind == "nothing" else nn.BatchNorm1d(width)

    def block(self, depth: int) -> nn.Module:
        block: nn.Module = self.draw(st.sampled_from(BLOCKS))()
        if self.draw(st.integers(0, 4)) == 0:
            block.register_parameter(self.name(), nn.Parameter(torch.empty(self.draw(st.integers(1, 9)))))
        for _ in range(self.draw(st.integers(1, 4))):
            deeper = depth > 0 and self.draw(st.booleans())
            block.add_module(self.name(), self.block(depth - 1) if deeper else self.leaf())
        return block


@st.composite
def trees(draw: Any, ties: bool = True) -> nn.Module:
    """A tree three levels deep; two of its modules may share one parameter."""
    with torch.device("meta"):
        shared = nn.Parameter(torch.empty(4, 4)) if ties else None
        return _Maker(draw, shared).block(2)
