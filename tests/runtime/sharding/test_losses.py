"""A sharded model has the losses and norms of one process, whatever the world, its mesh and the order of `prepare`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.accelerator import Accelerator as Façade
from accel.enums import DistributedType
from accel.plugins import GradientAccumulationPlugin
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from tests.runtime.worlds import run, run_one

from .training import Decoder, batch, decoder, loss_of, train

Seen = dict[str, Any]


def _accelerator(mesh: str, **how: Any) -> Façade:
    plugin = None if mesh == "whole" else FullyShardedDataParallelPlugin()
    config = ParallelismConfig(dp_replicate_size=2) if mesh == "hybrid" else None
    made = Accelerator(fsdp_plugin=plugin, parallelism_config=config, **how)
    assert made.distributed_type == (DistributedType.NO if mesh == "whole" else DistributedType.FSDP)
    return made


def _prepared(accelerator: Façade, optimizer: Callable[..., Any], **how: Any) -> tuple[Any, Any]:
    # Only the main process has the right weights.
    model = decoder(accelerator.process_index)
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer(model.parameters(), **how))
    return prepared


def _all(mesh: str) -> Seen:
    """Everything that must be as on one process."""
    accelerator = _accelerator(mesh)
    seen: Seen = {"AdamW": train(accelerator, *_prepared(accelerator, torch.optim.AdamW, lr=0.02))}
    for kind in (2.0, 1.0, float("inf")):
        model, optimizer = _prepared(accelerator, torch.optim.SGD, lr=0.5, momentum=0.9)
        seen[f"norm {kind}"] = train(accelerator, model, optimizer, clip=0.01, norm_type=kind)
    model, optimizer = _prepared(accelerator, torch.optim.SGD, lr=0.5)
    accelerator.backward(loss_of(model, batch(0, accelerator)))
    accelerator.clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()
    seen["value"] = train(accelerator, model, optimizer, steps=2, first=1)
    return seen


def _accumulated(mesh: str, each: bool) -> Seen:
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=each)
    accelerator = _accelerator(mesh, gradient_accumulation_plugin=plugin)
    return {"SGD": train(accelerator, *_prepared(accelerator, torch.optim.SGD, lr=0.3), steps=12, clip=0.1)}


def _near(seen: Seen, expected: Seen) -> None:
    assert seen.keys() == expected.keys()
    for name in expected:
        for mine, theirs in zip(seen[name], expected[name], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9), name


WORLDS = [("sharded", 2), ("sharded", 3), ("sharded", 4), ("hybrid", 4)]


@pytest.fixture(scope="module")
def whole() -> Seen:
    seen: Seen = run_one(_all, "whole")
    losses, norms = seen["norm 2.0"]
    assert len(set(losses)) == len(losses)
    assert min(norms) > 0.01  # the clipping is active at every step
    return seen


@pytest.mark.parametrize(("mesh", "processes"), WORLDS)
def test_losses_and_norms_are_those_of_one_process(mesh: str, processes: int, whole: Seen) -> None:
    for seen in run(_all, mesh, processes=processes):
        _near(seen, whole)


@pytest.mark.parametrize(("mesh", "processes", "each"), [("sharded", 2, False), ("sharded", 2, True),
                                                         ("hybrid", 4, False), ("hybrid", 4, True)])  # fmt: skip
def test_accumulated_windows_are_those_of_one_process(mesh: str, processes: int, each: bool) -> None:
    expected = run_one(_accumulated, "whole", each)
    for seen in run(_accumulated, mesh, each, processes=processes):
        _near(seen, expected)


def _in_order(mesh: str, order: str) -> tuple[list[float], list[float]]:
    accelerator = _accelerator(mesh)
    first, second = decoder(accelerator.process_index), decoder(accelerator.process_index + 7)
    optimizer: Any = torch.optim.AdamW([
        {"params": list(first.parameters()), "lr": 0.02}, {"params": list(second.blocks.parameters()), "lr": 0.01}
    ])  # fmt: skip
    teacher = decoder(accelerator.process_index + 3).requires_grad_(False)
    if order == "one call":
        optimizer, first, second, teacher = accelerator.prepare(optimizer, first, second, teacher)
    elif order == "models first":
        second = accelerator.prepare(second)
        first, teacher = accelerator.prepare(first, teacher)
        optimizer = accelerator.prepare(optimizer)
    else:
        first = accelerator.prepare(first)
        optimizer = accelerator.prepare(optimizer)
        teacher, second = accelerator.prepare(teacher, second)
    again, alike = accelerator.prepare(first, optimizer)
    assert (again is first, alike is optimizer) == (True, True)
    losses, norms = [], []
    for step in range(4):
        rows = batch(step, accelerator)
        with torch.no_grad():
            wanted = teacher(rows[:, :-1]).softmax(-1)
        loss = nn.functional.cross_entropy(
            (first(rows[:, :-1]) + second(rows[:, :-1])).flatten(0, 1), wanted.flatten(0, 1)
        )
        accelerator.backward(loss)
        both = [parameter for model in (second, first) for parameter in model.parameters()]
        norms.append(accelerator.clip_grad_norm_(both, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def test_models_and_optimizers_come_in_any_order() -> None:
    expected = run_one(_in_order, "whole", "one call")
    for order in ("one call", "models first", "between"):
        for seen in run(_in_order, "sharded", order):
            _near({order: seen}, {order: expected})


def _resumed(mesh: str) -> tuple[list[float], list[float]]:
    """An optimizer that has a state already when it is prepared."""
    accelerator = _accelerator(mesh)
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    rows = torch.randint(0, 32, (12, 7), generator=torch.Generator().manual_seed(99))
    loss_of(model, rows).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return train(accelerator, *accelerator.prepare(model, optimizer), steps=4, clip=0.1)


def _looked_at(mesh: str) -> tuple[list[float], list[float]]:
    """Evaluated between the backward pass and clipping, by a forward that nothing follows."""
    accelerator = _accelerator(mesh)
    model, optimizer = _prepared(accelerator, torch.optim.SGD, lr=0.5)
    losses, norms = [], []
    for step in range(3):
        loss = loss_of(model, batch(step, accelerator))
        accelerator.backward(loss)
        with torch.no_grad():
            loss_of(model, batch(step, accelerator))
        listed = list(model.parameters())
        loss_of(model, batch(step, accelerator))  # gathered, and no backward pass comes
        norms.append(accelerator.clip_grad_norm_(listed if step else model.parameters(), 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if mesh == "whole" else accelerator.reduce(loss.detach(), "mean").item())
    return losses, norms


def test_an_optimizer_keeps_its_state_and_clipping_sees_every_gradient_after_an_evaluation() -> None:
    for function in (_resumed, _looked_at):
        expected = run_one(function, "whole")
        for seen in run(function, "sharded"):
            _near({"": seen}, {"": expected})


def _collected(mesh: str) -> Seen:
    """Parameters listed before `prepare`: clipped, in groups that are added or replaced later, and in an LBFGS."""
    accelerator = _accelerator(mesh)
    model: Any = decoder()
    listed = list(model.parameters())
    later: Any = [model.position, [*model.norm.parameters(), model.embed.weight]]
    optimizer: Any = torch.optim.AdamW(model.blocks.parameters(), lr=0.02)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for step, adds in enumerate((None, optimizer, optimizer.optimizer, None, None)):
        if adds is not None:
            adds.add_param_group({"params": later[step - 1], "lr": 0.5})
        if step == 2:  # with gradients of the new group
            optimizer.zero_grad()
        if step == 3:
            optimizer.param_groups[1]["params"] = [later[0]]
        loss = loss_of(model, batch(0, accelerator))
        accelerator.backward(loss)
        accelerator.clip_grad_value_(iter(listed), 0.1)
        norms.append(accelerator.clip_grad_norm_(listed, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    seen: Seen = {"collected": (losses, norms)}
    torch.manual_seed(0)
    # As many rows as all worlds' processes divide: torch's LBFGS does not take uneven shards.
    linear: Any = nn.Linear(12, 12).double()
    linear, lbfgs = accelerator.prepare(linear, torch.optim.LBFGS(linear.parameters(), lr=0.001, max_iter=3))
    losses = []

    def closure() -> Any:
        lbfgs.zero_grad()
        loss = linear(torch.arange(24.0).double().view(2, 12)).square().mean()
        accelerator.backward(loss)
        losses.append(loss.item())
        return loss.detach()

    for _ in range(2):
        lbfgs.step(closure)
    return {**seen, "LBFGS": [losses]}


def test_parameters_that_were_listed_before_prepare_are_clipped_and_trained() -> None:
    expected = run_one(_collected, "whole")
    assert len(set(expected["LBFGS"][0])) > 4
    for seen in run(_collected, "sharded"):
        _near(seen, expected)


class _Observed(nn.Module):
    """A layer norm in a unit of its own, and a loss that autocast computes in fp32, beside a buffer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.shifts = False
        self.seen: list[Any] = []

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.first(rows))
        loss = nn.functional.mse_loss(hidden, torch.zeros_like(hidden))
        self.seen += [torch.is_autocast_enabled("cpu"), hidden.dtype, loss.dtype]
        output: torch.Tensor = self.last(hidden + self.shift if self.shifts else hidden)
        return {"output": output, "loss": loss}


def _precise() -> Seen:
    bf16 = torch.bfloat16
    accelerator: Any = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin())
    plugin: Any = accelerator.state.fsdp_plugin
    model = Decoder().to(bf16)
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    inside: list[torch.dtype] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: inside.append(module.weight.dtype))
    output = model(batch(0, accelerator)[:, :-1])
    accelerator.backward(output.float().square().mean())
    found = {
        "outputs": output.dtype,
        "computed": inside,
        "trained": {p.dtype for p in model.parameters() if p.requires_grad},
        "frozen": {p.dtype for p in model.parameters() if not p.requires_grad},
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "reduced": plugin.mixed_precision_policy.reduce_dtype,
    }
    rows = torch.ones(2, 4)
    observed = accelerator.prepare_model(_Observed(), evaluation_mode=True)
    observed(rows)
    found["evaluated"] = observed.seen[:1]
    observed = accelerator.prepare(observed)  # for training, now without autocast
    observed.seen.clear()
    found["observed"] = [*(value.dtype for value in observed(rows).values()), *observed.seen]
    observed.shifts = True
    try:
        observed(rows)
    except RuntimeError:
        with accelerator.autocast():
            found["buffer"] = observed(rows)["output"].dtype
    plugin.ignored_modules = "last"  # in fp32
    ignoring = accelerator.prepare(_Observed())
    accelerator.backward(ignoring(rows)["output"].sum())
    found["ignoring"] = [ignoring.seen[0], ignoring.last.weight.grad.dtype]
    plugin.ignored_modules = None
    plugin.set_mixed_precision({"param_dtype": bf16, "output_dtype": bf16})
    found["said"] = [value.dtype for value in accelerator.prepare(_Observed())(rows).values()]
    return found


def test_weights_gradients_and_outputs_are_fp32_and_the_computation_is_not() -> None:
    fp32, bf16 = torch.float32, torch.bfloat16
    for seen in run(_precise):
        assert seen == {
            "outputs": fp32,
            "computed": [bf16],
            "trained": {fp32},
            "frozen": {bf16},
            "gradients": {fp32},
            "reduced": fp32,
            "evaluated": [True],
            "observed": [fp32, fp32, False, bf16, bf16],
            "buffer": fp32,
            "ignoring": [True, fp32],
            "said": [bf16, bf16],
        }
