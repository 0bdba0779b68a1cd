"""`torch.compile` by plugin, argument and environment: whole models and their repeated blocks, alone and spread."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.errors import ArgumentError
from accel.parallel.unwrap import extract_model_from_parallel, is_compiled_module
from accel.plugins import TorchDynamoPlugin
from accel.training.compile import (
    compile_regions,
    compile_regions_in_place,
    has_compiled_regions,
    has_repeated_blocks,
    is_repeated_blocks,
)
from tests.marks import long

from ..worlds import outcomes, run, run_one


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))


class Deep(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


# torch 2.13's tracer reads `grad` of tensors in the graph and warns at itself.
ITSELF = "The .grad attribute of a Tensor that is not a leaf"
pytestmark = pytest.mark.filterwarnings(f"ignore:{ITSELF}")


def seeded() -> Deep:
    torch.manual_seed(0)
    return Deep()


def _trained(how: dict[str, Any], precision: str = "no") -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=ITSELF)
    plugin = TorchDynamoPlugin(**how) if how else None
    accelerator = Accelerator(dynamo_plugin=plugin, mixed_precision=precision)
    raw = seeded()
    names = set(raw.state_dict())
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    inputs = torch.arange(8.0).reshape(2, 4) / 8 + accelerator.process_index
    for _ in range(3):
        loss = model(inputs).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.gather(raw.head.weight.detach())
    before = accelerator.unwrap_model(model)(inputs).detach()
    return {
        "weights": weights[0].tolist(),
        "alike": all(torch.equal(row, weights[0]) for row in weights),
        "names": set(accelerator.get_state_dict(model)) == names,
        "compiled": has_compiled_regions(model),
        "whole": is_compiled_module(model),
        "bare": accelerator.unwrap_model(model, keep_torch_compile=False) is raw,
        "kept": has_compiled_regions(accelerator.unwrap_model(model)),
        "single": not any("ddp" in type(m).__name__.lower() for m in accelerator.unwrap_model(model).modules()),
        "same": torch.allclose(before, raw(inputs).float(), atol=1e-2),
        "again": accelerator.prepare(model) is model,
        "dtype": str(model(inputs).dtype),
    }


EAGER = {"backend": "eager"}
REGIONS = {"backend": "eager", "use_regional_compilation": True}


@pytest.mark.parametrize("processes", [2, *long(1)])
def test_compiled_models_train_as_the_others_do(processes: int) -> None:
    plain = run(_trained, {}, processes=processes)[0]
    assert not plain["compiled"]
    for how, whole in ((EAGER, True), (REGIONS, False)):
        for seen in run(_trained, how, processes=processes):
            assert seen["weights"] == pytest.approx(plain["weights"])
            assert seen["whole"] is (whole or False)
            wanted = ("alike", "names", "compiled", "bare", "kept", "single", "same", "again")
            assert {name: seen[name] for name in wanted} == dict.fromkeys(wanted, True)


@pytest.mark.parametrize("how", [EAGER, REGIONS], ids=["whole", "regions"])
def test_compiled_models_compute_in_mixed_precision(how: dict[str, Any]) -> None:
    plain = run(_trained, {}, "bf16")[0]
    for seen in run(_trained, how, "bf16"):
        assert seen["weights"] == pytest.approx(plain["weights"], abs=1e-2)
        assert seen["dtype"] == "torch.float32"
        assert [seen[name] for name in ("alike", "names", "bare", "single")] == [True] * 4


def _out_of_precision(how: dict[str, Any]) -> list[str]:
    warnings.filterwarnings("ignore", message=ITSELF)
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(**how), mixed_precision="bf16")
    raw = seeded()
    dtypes: list[str] = []
    raw.head.register_forward_hook(lambda _, __, output: dtypes.append(str(output.dtype)))
    model = accelerator.prepare(raw)
    inputs = torch.ones(1, 4)
    raw(inputs)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)(inputs)
    return dtypes


@pytest.mark.parametrize("how", [{"backend": "no"}, EAGER, REGIONS], ids=["plain", "whole", "regions"])
def test_unwrapping_takes_the_precision_off_compiled_models_too(how: dict[str, Any]) -> None:
    assert run_one(_out_of_precision, how) == ["torch.bfloat16", "torch.float32"]


def _inductor() -> list[Any]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.jit, when inductor is imported
    accelerator = Accelerator(dynamo_backend="inductor")
    raw = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model = accelerator.prepare(raw)
    inputs = torch.ones(2, 4)
    return [
        torch.allclose(model(inputs), raw(inputs)),
        is_compiled_module(model),
        accelerator.state.dynamo_plugin.backend,
    ]


def test_inductor_compiles() -> None:
    assert run_one(_inductor) == [True, True, "INDUCTOR"]


def _from_env() -> dict[str, Any]:
    return Accelerator().dynamo_plugin.to_kwargs()


def test_the_environment_asks_for_compilation() -> None:
    env = {
        "ACCELERATE_DYNAMO_BACKEND": "aot_eager",
        "ACCELERATE_DYNAMO_MODE": "reduce-overhead",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "0",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "1",
    }
    asked = {"backend": "aot_eager", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert run_one(_from_env, env=env) == asked
    assert run_one(_from_env) == {}
    told = outcomes(_from_env, processes=1, env={"ACCELERATE_DYNAMO_BACKEND": "inducter"})[0]
    assert told.error == "ArgumentError"
    assert told.message.startswith("environment variable ACCELERATE_DYNAMO_BACKEND: 'INDUCTER' is not one of NO, EAGER")
    assert told.message.endswith("did you mean 'INDUCTOR'?")


def test_a_plugin_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"mode=…\): 'fast' is not one of default"):
        TorchDynamoPlugin(backend="eager", mode="fast")
    with pytest.raises(ArgumentError, match="pass mode='max-autotune' or options, not both"):
        TorchDynamoPlugin(mode="max-autotune", options={"epilogue_fusion": True})


def _twice() -> None:
    Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


def test_a_backend_is_given_once() -> None:
    assert outcomes(_twice, processes=1)[0].message == "pass Accelerator(dynamo_backend=…) or dynamo_plugin, not both"


def test_regions_are_the_repeated_blocks_and_the_rest() -> None:
    raw = seeded()
    made = compile_regions(raw, backend="eager")
    assert made is not raw
    assert not has_compiled_regions(raw)
    assert all(is_compiled_module(block) for block in made.blocks)  # type: ignore[union-attr]
    assert is_compiled_module(made.head)  # type: ignore[arg-type]
    assert [a is b for a, b in zip(made.parameters(), raw.parameters(), strict=True)] == [True] * 8
    inputs = torch.randn(2, 4)
    assert torch.equal(made(inputs), raw(inputs))
    assert extract_model_from_parallel(made) is made
    assert extract_model_from_parallel(made, keep_torch_compile=False) is raw
    assert torch.equal(copy.deepcopy(made)(inputs), raw(inputs))


def test_repeated_blocks_are_told_from_other_lists() -> None:
    assert is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.Linear(2, 2)]))
    assert not is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(nn.Sequential(nn.Linear(1, 1)))
    assert has_repeated_blocks(nn.Sequential(seeded()))
    assert not has_repeated_blocks(nn.Linear(1, 1))


def test_compiling_in_place_keeps_names_and_hooks() -> None:
    raw = seeded()
    names, inputs = list(raw.state_dict()), torch.randn(2, 4)
    expected = raw(inputs)
    fired: list[int] = []
    raw.blocks[0].register_forward_hook(lambda *_: fired.append(1))
    assert compile_regions_in_place(raw, backend="eager") is raw
    assert torch.equal(raw(inputs), expected)
    assert fired == [1]
    assert list(raw.state_dict()) == names


def test_recursive_unwrapping_reaches_wrapped_parts() -> None:
    inner = nn.Linear(2, 2)
    model: Any = nn.Sequential(nn.DataParallel(inner), nn.Sequential(nn.DataParallel(nn.ReLU())))
    assert extract_model_from_parallel(nn.DataParallel(model)) == model
    assert model[0] is not inner
    assert extract_model_from_parallel(nn.DataParallel(model), recursive=True) == model
    assert model[0] is inner
    assert isinstance(model[1][0], nn.ReLU)


def test_who_does_not_compile_does_not_wait_for_the_compiler(tmp_path: Path) -> None:
    script = (
        "import sys, torch, accel; a = accel.Accelerator(cpu=True); m = torch.nn.Linear(1, 1)\n"
        "m, o = a.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1)); a.backward(m(torch.ones(1, 1)).sum()); "
        "a.unwrap_model(m)\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


def _checkpointed(how: dict[str, Any], directory: str) -> list[Any]:
    warnings.filterwarnings("ignore", message=ITSELF)
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(**how))
    raw = seeded()
    model, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    accelerator.save_state(directory)
    with torch.no_grad():
        raw.head.weight.zero_()
    accelerator.load_state(directory)
    from safetensors import safe_open

    with safe_open(f"{directory}/model.safetensors", "pt") as file:
        names = sorted(file.keys())
    return [names == sorted(raw.state_dict()), raw.head.weight.abs().sum().item() > 0, model(torch.ones(1, 4)).shape]


@pytest.mark.parametrize("how", [EAGER, REGIONS], ids=["whole", "regions"])
@pytest.mark.parametrize("processes", [2, *long(1)])
def test_checkpoints_of_compiled_models_have_plain_names(how: dict[str, Any], processes: int, tmp_path: Path) -> None:
    assert run(_checkpointed, how, str(tmp_path / "kept"), processes=processes) == [[True, True, (1, 1)]] * processes


def _compiled_by_hand() -> list[bool]:
    accelerator = Accelerator()
    raw = nn.Linear(1, 1)
    compiled = torch.compile(raw, backend="eager")
    model = accelerator.prepare(compiled)
    return [
        accelerator.unwrap_model(model) is compiled,
        accelerator.unwrap_model(model, keep_torch_compile=False) is raw,
    ]


@pytest.mark.parametrize("processes", [2, *long(1)])
def test_unwrapping_a_model_that_the_script_compiled(processes: int) -> None:
    assert run(_compiled_by_hand, processes=processes) == [[True, True]] * processes
