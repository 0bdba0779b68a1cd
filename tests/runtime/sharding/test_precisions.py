"""Which types weights have in a unit, and the scaler of fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.parallel.shares import full_tensor
from accel.plugins import GradScalerKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.precision.amp import HalfPrecision
from tests.runtime.worlds import run, run_one

from .training import Decoder, batch, decoder, loss_of


def _scaled(ignored: str | None, kind: str, how: dict[str, Any]) -> dict[str, Any]:
    """Steps by a scaler, of which the second has an infinite gradient on the last process alone."""
    accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules=ignored))
    accelerator.precision = HalfPrecision(torch.device("cpu"), None, GradScalerKwargs(init_scale=1024.0))
    model: Any = decoder()
    listed = list(model.parameters())
    model, optimizer = accelerator.prepare(model, getattr(torch.optim, kind)(listed[1:], lr=0.1, **how))
    optimizer.add_param_group({"params": listed[:1]})
    skipped, moved, norms = [], [], []
    for step in range(3):
        before = [full_tensor(p).clone() for p in model.parameters()]
        loss = loss_of(model, batch(0, accelerator))
        if step == 1 and accelerator.is_last_process:
            loss = loss * float("inf")
        accelerator.backward(loss)
        if step == 0:  # otherwise the step unscales the gradients
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        moved.append({not torch.equal(full_tensor(p), b) for p, b in zip(model.parameters(), before, strict=True)})
    scaler: Any = accelerator.scaler
    accelerator.precision.finish_pending()
    last = loss_of(model, batch(1, accelerator)).detach()
    norms.append(accelerator.reduce(last, "mean").item())
    return {"skipped": skipped, "moved": moved, "scale": scaler.get_scale(), "norm and last loss": norms}


@pytest.mark.parametrize(
    ("ignored", "kind", "how"),
    [(None, "SGD", {}), ("norm", "SGD", {"foreach": True}), ("embed", "AdamW", {"fused": True})],
    ids=str,
)
def test_an_overflow_on_one_process_leaves_out_the_step_of_all(
    ignored: str | None, kind: str, how: dict[str, Any]
) -> None:
    expected = run_one(_scaled, ignored, kind, how)
    assert expected["skipped"] == [False, True, False]
    assert (expected["moved"], expected["scale"]) == ([{True}, {False}, {True}], 512.0)
    expected["norm and last loss"] = pytest.approx(expected["norm and last loss"], abs=1e-9)
    assert run(_scaled, ignored, kind, how) == [expected, expected]


class _Quantised(nn.Module):
    """A frozen table of bytes, a frozen layer in 16 bits and a trained one in 32, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(12, dtype=torch.uint8).view(6, 2), requires_grad=False)
        self.base = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)
        self.added = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias = self.table.to(torch.float32).sum(0)
        found: torch.Tensor = self.added(rows) + self.base(rows.to(torch.bfloat16)).float() + bias
        return found


def _mixed(precision: str) -> dict[str, Any]:
    accelerator = Accelerator(fsdp_plugin=Plugin(), mixed_precision=precision)
    torch.manual_seed(0)
    bare = _Quantised()
    kept = {name: value.clone() for name, value in bare.state_dict().items()}
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.added.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 2)).square().mean())
    optimizer.step()
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {
        "types": {name: str(value.dtype).removeprefix("torch.") for name, value in state.items()},
        "same": [name for name, value in state.items() if torch.equal(value, kept[name])],
    }


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_frozen_parameters_of_other_types_stay_as_they_are_beside_trained_ones(precision: str) -> None:
    for seen in run(_mixed, precision):
        assert seen == {
            "types": {"table": "uint8", "base.weight": "bfloat16", "base.bias": "bfloat16",
                      "added.weight": "float32", "added.bias": "float32"},
            "same": ["table", "base.weight", "base.bias"],
        }  # fmt: skip


def _as_they_are() -> set[torch.dtype]:
    accelerator = Accelerator(fsdp_plugin=Plugin())
    model = accelerator.prepare(Decoder().to(torch.bfloat16))
    accelerator.backward(model(batch(0, accelerator)[:, :-1]).float().square().mean())
    return {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}


def test_without_mixed_precision_weights_in_16_bits_stay_so() -> None:
    assert run(_as_they_are) == [{torch.bfloat16}] * 2
