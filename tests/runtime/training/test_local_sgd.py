"""Local SGD: processes apart for some steps, and together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, local_sgd
from accel.collectives import all_objects
from accel.errors import ArgumentError
from accel.local_sgd import LocalSGD

from ..worlds import run, run_one


def _apart(steps: int, every: int, enabled: bool = True, piece: int = 64 << 20) -> dict[str, Any]:
    local_sgd._PIECE = piece
    accelerator = Accelerator()
    raw: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in raw.parameters():
        nn.init.ones_(parameter)
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw[:1].parameters(), lr=1.0))
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=enabled) as region:
        for _ in range(steps):
            # The gradient of the first weight is rank + 1.
            accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
            region.step()
            seen.append(raw[0].weight.item())
    final = raw[0].weight.item()
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    return {"seen": seen, "final": final, "gradient": raw[0].weight.grad.item(), "alike": len(set(all_objects(final)))}


def test_weights_are_averaged_every_few_steps_and_at_the_end() -> None:
    first, second = run(_apart, 3, 2)
    # Apart: 1 - 1 = 0 and 1 - 2 = -1; then -1 and -3, averaged: -2; then -3 and -4, averaged at the end.
    assert first["seen"] == [0.0, -2.0, -3.0]
    assert second["seen"] == [-1.0, -2.0, -4.0]
    for seen in (first, second):
        assert (seen["final"], seen["alike"]) == (-3.5, 1)
        assert seen["gradient"] == 1.5  # behind the region gradients are averaged again


def test_large_models_are_averaged_in_pieces() -> None:
    assert [seen["final"] for seen in run(_apart, 3, 2, True, 4)] == [-3.5, -3.5]


def test_a_region_that_is_not_enabled_does_nothing() -> None:
    for seen in run(_apart, 3, 2, False):
        assert seen["seen"] == [-0.5, -2.0, -3.5]
    assert run_one(_apart, 2, 1)["seen"] == [0.0, -1.0]


def _left_by_an_error() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.module.weight, float(accelerator.process_index))
    try:
        with LocalSGD(accelerator, model, 8):
            raise KeyError("one process fails, the other too, but neither knows")
    except KeyError:
        pass
    return [model.module.weight.item(), float(model.require_backward_grad_sync)]


def test_an_error_is_not_answered_by_a_collective() -> None:
    assert run(_left_by_an_error) == [[0.0, 1.0], [1.0, 1.0]]


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ArgumentError, match=r"LocalSGD\(local_sgd_steps=0\): it must be 1 or more"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), 0)
