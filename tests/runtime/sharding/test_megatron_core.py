"""Models of megatron-core, on gloo under a stand-in for CUDA: they train as in one process, and resume to the bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.errors import AccelError
from accel.state import AcceleratorState
from tests import needs
from tests.marks import long
from tests.runtime.sharding.megatron_run import (
    Settings,
    accelerator_of,
    evaluate,
    forget,
    prepared,
    train,
    weights,
)
from tests.runtime.worlds import run, run_one

PRELOAD = ("megatron.core.models.gpt", "megatron.core.distributed", "torch._inductor.compile_fx")

if find_spec("megatron") is None:
    needs.missing("megatron-core", "pip install -c constraints.txt megatron-core")

EXPERTS: Settings = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": "none"}
CHANGES: dict[str, Settings] = {"dense": {}, "experts": EXPERTS}
SHARDED: Settings = {"use_distributed_optimizer": True}
PIPELINE: Settings = {"pp_degree": 2, "num_micro_batches": 4}
TWO: list[tuple[str, Settings]] = [
    ("dense", {"tp_degree": 2}),
    ("dense", PIPELINE),
    ("dense", SHARDED),
    ("experts", {"expert_model_parallel_size": 2}),
]
FOUR: list[tuple[str, Settings]] = [
    ("dense", {"tp_degree": 2}),
    ("dense", {"pp_degree": 2, "num_micro_batches": 2, **SHARDED}),
]
RARE: list[tuple[str, Settings]] = [
    ("dense", {"tp_degree": 2, **PIPELINE}),
    ("experts", {"pp_degree": 2, "expert_model_parallel_size": 2, **SHARDED}),
]


def _one(folder: Path) -> dict[str, Any]:
    """One process: save before the first step and after the last, train again from there, evaluate."""
    seen: dict[str, Any] = {}
    for kind, changes in CHANGES.items():
        accelerator = accelerator_of(changes=changes)
        assert accelerator.distributed_type == "MEGATRON_LM"
        model, optimizer, batches = prepared(accelerator)
        accelerator.save_state(folder / kind)
        seen[kind] = train(accelerator, model, optimizer, batches)
        accelerator.save_state(folder / f"{kind} later")
        seen[f"{kind} weights"] = weights(accelerator, model)
        seen[f"{kind} later"] = train(accelerator, model, optimizer, batches)
        seen[f"{kind} evaluated"] = evaluate(model, batches)
        forget(accelerator)
    return {**seen, **_in_windows(folder)}


def _in_windows(folder: Path) -> dict[str, Any]:
    accelerator = accelerator_of(steps=2)
    objects = prepared(accelerator)
    accelerator.load_state(folder / "dense")
    losses = train(accelerator, *objects)
    forget(accelerator)
    return {"windows": losses}


def _in_world(folder: Path, cases: list[tuple[str, Settings]]) -> list[dict[str, Any]]:
    """Load the state of one process in worlds of other sizes, before its first step and after its last, and train."""
    seen: list[dict[str, Any]] = []
    for kind, settings in cases:
        accelerator = accelerator_of(changes=CHANGES[kind], **settings)
        model, optimizer, batches = prepared(accelerator)
        accelerator.load_state(folder / kind)
        losses = {kind: train(accelerator, model, optimizer, batches)}
        losses[f"{kind} weights"] = weights(accelerator, model)  # type: ignore[assignment]
        if kind == "dense" and "use_distributed_optimizer" in settings:  # whose state two processes save and four load
            if accelerator.num_processes == 2:
                accelerator.save_state(folder / "sharded later")
            else:
                accelerator.load_state(folder / "sharded later")
                losses["sharded later"] = train(accelerator, model, optimizer, batches)
        elif kind == "dense":
            accelerator.load_state(folder / f"{kind} later")
            losses[f"{kind} later"] = train(accelerator, model, optimizer, batches)
            losses[f"{kind} evaluated"] = evaluate(model, batches)  # type: ignore[assignment]
        forget(accelerator)
        seen.append(losses)
    return seen


def _resumed(folder: Path, **sizes: Any) -> dict[str, list[Any]]:
    """Train on after a save; load it into the same objects, and into fresh ones with other random numbers."""
    settings: Settings = {"changes": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, **sizes}
    accelerator = accelerator_of(**settings)
    model, optimizer, batches = prepared(accelerator)
    train(accelerator, model, optimizer, batches)
    accelerator.save_state(folder / "dropping")
    seen = {"after": train(accelerator, model, optimizer, batches)}
    accelerator.load_state(folder / "dropping")
    seen["again"] = train(accelerator, model, optimizer, batches)
    forget(accelerator)
    accelerator = accelerator_of(seed=5, **settings)
    model, optimizer, batches = prepared(accelerator)
    accelerator.load_state(folder / "dropping")
    seen["fresh"] = train(accelerator, model, optimizer, batches)
    forget(accelerator)
    return seen


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(AccelError) as caught:
        call()
    return str(caught.value)


def _sizes_refused() -> list[str]:
    seen = [_message(lambda: accelerator_of(tp_degree=3))]
    AcceleratorState._reset_state()
    cases: list[Settings] = [
        {"tp_degree": 2, "changes": {"num_attention_heads": 3, "hidden_size": 33}},
        {"pp_degree": 2, "changes": {"num_layers": 3}},
        {"tp_degree": 2, "changes": {"tensor_model_parallel_size": 1}},
    ]
    for settings in cases:
        accelerator = accelerator_of(**settings)
        seen.append(_message(lambda: prepared(accelerator)))  # noqa: B023 - called at once
        forget(accelerator)
    return seen


def _shuffled() -> list[list[int]]:
    """The order of a shuffled loader, in all processes of a pipeline, whose random numbers differ."""
    accelerator = accelerator_of(**PIPELINE)
    torch.manual_seed(accelerator.process_index)
    batches = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(32), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    order = [batch.tolist() for batch in batches]
    forget(accelerator)
    return order


def _two(folder: Path) -> dict[str, Any]:
    """Everything that needs two processes."""
    return {
        "refused": _sizes_refused(),
        "cases": _in_world(folder, TWO),
        "windows": _in_windows(folder),
        "shuffled": _shuffled(),
        "resumed": [_resumed(folder, tp_degree=2), _resumed(folder, **SHARDED)],
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("megatron")
    return folder, run_one(_one, folder)


@pytest.fixture(scope="module")
def two(one: tuple[Path, dict[str, Any]]) -> list[dict[str, Any]]:
    return run(_two, one[0])


def _check(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in seen.items():
        if name.endswith("weights"):
            assert values.keys() in (expected[name].keys(), set())  # the main process has them
            for weight, value in values.items():
                torch.testing.assert_close(value, expected[name][weight], rtol=0, atol=1e-4, msg=weight)
        else:
            another, tolerance = ("dense later", 3e-5) if name == "sharded later" else (name, 3e-6)
            torch.testing.assert_close(values, expected[another], rtol=0, atol=tolerance, msg=name)


def test_two_processes_train_as_one(one: tuple[Path, dict[str, Any]], two: list[dict[str, Any]]) -> None:
    for seen in two:
        for case in (*seen["cases"], seen["windows"]):
            _check(case, one[1])


@pytest.mark.parametrize("cases", [FOUR, *long(RARE)])
@pytest.mark.usefixtures("two")
def test_four_processes_train_as_one(one: tuple[Path, dict[str, Any]], cases: list[tuple[str, Settings]]) -> None:
    for seen in run(_in_world, one[0], cases, processes=4):
        for case in seen:
            _check(case, one[1])


def test_all_stages_read_the_same_batches_of_all_micro_batches(two: list[dict[str, Any]]) -> None:
    first, second = (seen["shuffled"] for seen in two)
    assert first == second
    assert [len(batch) for batch in first] == [8] * 4


def test_a_run_resumes_to_the_bit(two: list[dict[str, Any]]) -> None:
    for seen in two:
        for losses in seen["resumed"]:
            assert losses["after"] == losses["again"] == losses["fresh"]


def test_sizes_that_do_not_fit_are_one_line(two: list[dict[str, Any]]) -> None:
    for seen in two:
        world, heads, layers, config = seen["refused"]
        assert (
            "processes (2) is not divisible by tp_degree (3) × pp_degree (1) × context_parallel_size (1) = 3" in world
        )
        assert "num_attention_heads (3) must be a multiple of tensor_model_parallel_size (2)" in heads
        assert "layers" in layers
        assert "tp_degree=2), but the model's TransformerConfig has tensor_model_parallel_size=1" in config
        assert not any("\n" in line for line in seen["refused"])
