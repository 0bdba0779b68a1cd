"""What processes send each other to keep and load a sharded run does not grow with the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel import Accelerator
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from tests.runtime.worlds import run


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that go through collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.sizes += [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def _sent(folder: str) -> list[list[int]]:
    """By width of the model: bytes in a step's collectives, and in those of saving and of loading it."""
    return [list(_of_width(width, f"{folder}/{width}")) for width in (8, 256)]


def _of_width(width: int, folder: str) -> Iterator[int]:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model: Any = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.ones(1, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    for action in (step, lambda: accelerator.save_state(folder), lambda: accelerator.load_state(folder)):
        with _Counted() as counted:
            action()
        yield sum(counted.sizes)
    accelerator.free_memory()


def test_no_collective_of_saving_and_loading_grows_with_the_model(tmp_path: Any) -> None:
    for (small_step, *small), (large_step, *large) in run(_sent, str(tmp_path)):
        assert large_step > 100 * small_step > 0  # it is counted
        # Digests and paths, whose digits vary.
        assert all(abs(more - less) < 200 for less, more in zip(small, large, strict=True)), (small, large)
        assert min(small) > 0
