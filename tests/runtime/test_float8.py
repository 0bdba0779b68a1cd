"""Training in 8 bits: torchao in worlds of two, by DDP and FSDP, beside fp32; refusals; Transformer Engine's calls."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.accelerator.arguments import handlers_by_class
from accel.errors import ArgumentError, PrecisionError
from accel.fp8_recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs, import_float8
from accel.parallel.shares import full_tensor
from accel.plugins.deepspeed import DeepSpeedPlugin
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import ParallelismConfig
from accel.precision import choose_precision
from accel.precision.float8 import (
    Float8,
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
    is_float8_layer,
)
from accel.precision.transformer_engine import apply_fp8_autowrap, convert_model, has_transformer_engine_layers
from accel.state import AcceleratorState
from accel.world.available import is_torchao_available
from tests.needs import missing
from tests.runtime.worlds import outcomes, run, run_one

PRELOAD = ("torchao.float8",)

if not is_torchao_available():
    missing("torchao", "pip install -c constraints.txt --no-deps torchao")

STANDINS = Path(__file__).parents[1] / "standins"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)  # reads its layer's weight, without calling the layer
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        result: torch.Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return result


class Model(nn.Module):
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.odd = nn.Linear(32, 30)
        self.last = nn.Linear(30, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.last(self.odd(hidden))
        return result


CONVERTED = ["blocks.0.down", "blocks.0.up", "blocks.1.down", "blocks.1.up"]


def _recipe(name: str, gathers_in_8_bits: bool = True) -> AORecipeKwargs:
    """``default``: accel's own, which gathers in 8 bits under FSDP."""
    if name == "default":
        return AORecipeKwargs(enable_fsdp_float8_all_gather=gathers_in_8_bits)
    return AORecipeKwargs(config=import_float8().Float8LinearConfig.from_recipe_name(name))


def _losses(accelerator: Accelerator) -> tuple[list[float], Any, Any]:
    """Ten steps; the mean losses of all processes together, the prepared model and the optimizer."""
    torch.manual_seed(0)
    model = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(10):
        rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(step)).to(accelerator.device)
        own = rows.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = (model(own) - own.roll(1, 1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, model, optimizer


def _fp32() -> list[float]:
    return _losses(Accelerator(cpu=True))[0]


def _weights(model: Any) -> dict[str, list[float]]:
    return {name: full_tensor(value).flatten().tolist() for name, value in model.state_dict().items()}


def _accelerator(sharded: bool, precision: str, recipe: Any = None) -> Accelerator:
    handlers = [] if recipe is None else [recipe]
    plugin = Plugin() if sharded else None
    return Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers, fsdp_plugin=plugin)


def _run(sharded: bool, folder: Path) -> dict[str, Any]:
    """Losses of every recipe; what was converted; and checkpoints of each precision loaded by the other."""
    seen: dict[str, Any] = {}
    for name in RECIPES:
        seen[name] = _losses(_accelerator(sharded, "fp8", _recipe(name)))[0]
    seen["gathered in bf16"] = _losses(_accelerator(sharded, "fp8", _recipe("default", gathers_in_8_bits=False)))[0]
    accelerator = _accelerator(sharded, "fp8")
    seen["default"], model, _ = _losses(accelerator)
    unwrapped = accelerator.unwrap_model(model)
    kinds = {name: type(module).__name__ for name, module in unwrapped.named_modules()}
    seen["converted"] = sorted(name for name, kind in kinds.items() if kind == "Float8Linear")
    weight: Any = unwrapped.get_parameter("blocks.0.up.weight")
    seen["gathers"] = type(weight.to_local() if sharded else weight).__name__
    seen["facts"] = [
        accelerator.fp8_backend.value,
        accelerator.fp8_enabled,
        accelerator.mixed_precision,
        type(accelerator.ao_recipe_handler).__name__,
        model(torch.ones(1, 16)).dtype,
    ]
    saved = seen["saved"] = _weights(accelerator.unwrap_model(model))
    accelerator.save_state(folder / "fp8")
    accelerator.save_model(model, folder / "model")
    seen["whole"] = accelerator.get_state_dict(model).keys() == saved.keys() or not accelerator.is_main_process
    going_on = _next(accelerator, model)
    for precision, source in (("bf16", "fp8"), ("fp8", "bf16")):
        AcceleratorState._reset_state()
        other = _accelerator(sharded, precision)
        model, optimizer = other.prepare(fresh := Model(), torch.optim.AdamW(fresh.parameters(), lr=0.01))
        other.load_state(folder / source)
        seen[f"{source} in {precision}"] = _weights(other.unwrap_model(model)) == saved
        seen[f"moments of {source} in {precision}"] = len(optimizer.state_dict()["state"])
        seen[f"next loss of {source} in {precision}"] = abs(_next(other, model) - going_on)
        other.save_state(folder / precision) if precision == "bf16" else None
    return seen


def _next(accelerator: Accelerator, model: Any) -> float:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return accelerator.reduce((model(rows) - rows).square().mean(), "mean").item()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def fp32() -> list[float]:
    losses: list[float] = run_one(_fp32)
    return losses


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_losses_are_near_those_of_fp32_and_checkpoints_load_in_both_precisions(
    sharded: bool, fp32: list[float], tmp_path: Path
) -> None:
    seen, other = run(_run, sharded, tmp_path)
    assert seen["saved"] == other["saved"]
    for name in (*RECIPES, "default", "gathered in bf16"):
        assert seen[name] == pytest.approx(fp32, abs=1e-1)
        assert seen[name] != fp32
        assert seen[name] == other[name]
    assert seen["converted"] == CONVERTED
    assert seen["gathers"] == ("WeightWithDynamicFloat8CastTensor" if sharded else "Parameter")
    assert seen["facts"] == ["AO", True, "fp8", "AORecipeKwargs", torch.float32]
    assert (seen["whole"], other["whole"]) == (True, True)
    for pair in ("fp8 in bf16", "bf16 in fp8"):
        assert seen[pair]
        assert seen[f"moments of {pair}"] == 26
        assert seen[f"next loss of {pair}"] < 1e-2
    assert run_one(_plain, tmp_path / "model") == seen["saved"]


def _plain(folder: Path) -> dict[str, list[float]]:
    """Whole weights of `save_model`, in a model of torch's own layers."""
    from safetensors.torch import load_file

    model = Model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return _weights(model)


def _tensor_parallel() -> None:
    model = Model()
    vars(model)["tp_plan"] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    Accelerator(cpu=True, mixed_precision="fp8", parallelism_config=ParallelismConfig(tp_size=2)).prepare(model)


def test_split_layers_are_refused() -> None:
    words = "ParallelismConfig(tp_size=2): layers in 8 bits (mixed_precision='fp8') cannot be split: leave out one of "
    words += "the two"
    assert [outcome.message for outcome in outcomes(_tensor_parallel)] == [words, words]


def _mistakes() -> list[str]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    words = []
    actions: list[Callable[[], Any]] = [
        lambda: accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))),
        lambda: Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()]),
        lambda: handlers_by_class([MSAMPRecipeKwargs(), AORecipeKwargs()]),
        lambda: choose_precision("bf16", torch.device("cpu"), recipe=AORecipeKwargs()),
    ]
    for action in actions:
        with pytest.raises(ArgumentError) as caught:
            action()
        words.append(str(caught.value))
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ArgumentError, match="mixed_precision='fp8', but fp16 is enabled in"):
        DeepSpeedPlugin(hf_ds_config=config).set_mixed_precision("fp8")
    prepared = accelerator.prepare_model(Model(), evaluation_mode=True)
    words.append(str(has_ao_layers(prepared)))
    return words


def test_mistakes_are_one_line() -> None:
    assert run_one(_mistakes) == [
        "mixed_precision='fp8': the Sequential has no layer to convert: a linear one other than the first and "
        "the last, with sizes divisible by 16. Use 'bf16', or AORecipeKwargs(module_filter_func=…)",
        "mixed_precision='fp8' with MS-AMP, which is no longer developed, is not supported: use torchao "
        "(AORecipeKwargs, ACCELERATE_FP8_BACKEND=AO)",
        "kwargs_handlers: MSAMPRecipeKwargs and AORecipeKwargs are two ways to compute in 8 bits: pass one",
        "kwargs_handlers: AORecipeKwargs is for mixed_precision='fp8', and this run has 'bf16': change one of them",
        "False",
    ]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("msamp", "MS-AMP, which is no longer developed, is not supported: use torchao"),
        ("te", "Transformer Engine is not installed: pip install 'transformer-engine\\[pytorch]'"),
        ("t", "environment variable ACCELERATE_FP8_BACKEND: 'T' is not one of AO, TE, MSAMP"),
    ],
)
def test_a_library_that_cannot_be_used_is_one_line(backend: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    with pytest.raises(ArgumentError, match=words):
        choose_precision("fp8", torch.device("cpu"))


def test_devices_without_8_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    words = r"needs compute capability 8.9, and cuda:0 \(NVIDIA A40\) has 8.6: use 'bf16'"
    with pytest.raises(PrecisionError, match=words):
        choose_precision("fp8", torch.device("cuda", 0))
    with pytest.raises(PrecisionError, match="'fp8' is not supported by mps: use 'bf16' or 'no'"):
        choose_precision("fp8", torch.device("mps"))


def test_without_torchao_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.precision.is_torchao_available", lambda: False)
    with pytest.raises(PrecisionError, match=r"needs torchao 0.6.1 or newer: pip install 'accel-launch\[fp8]'"):
        choose_precision("fp8", torch.device("cpu"))


def _warned() -> list[str]:
    """The warnings about speed: on a CPU, and on a GPU where nothing compiles the model."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel.precision.float8").addHandler(handler)
    AcceleratorState(cpu=True)
    precision, model = Float8(torch.device("cpu"), AORecipeKwargs()), Model()
    precision.convert(model)
    precision.device = torch.device("cuda")
    precision.convert(model, compiled=True)
    messages.append("compiled")
    precision.convert(model)
    return [words[:60] for words in messages]


def test_what_makes_it_slow_is_a_warning() -> None:
    assert run_one(_warned) == [
        "mixed_precision='fp8' on a CPU computes in software: to test",
        "compiled",
        "mixed_precision='fp8' is slower than 'bf16' without torch.co",
    ]


def test_a_recipe_has_what_variables_and_arguments_say(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
    assert [getattr(AORecipeKwargs().config, name) for name in both] == [True, True]
    for name in both:
        monkeypatch.setenv(f"ACCELERATE_FP8_{name.upper()}", "false")
        assert getattr(AORecipeKwargs().config, name) is False
        argument: Any = {name: True}
        assert getattr(AORecipeKwargs(**argument).config, name) is True
    model, recipe = Model(), AORecipeKwargs(module_filter_func=lambda module, name: name == "blocks.0.up")
    Float8(torch.device("cpu"), recipe).convert(model)
    assert [name for name, module in model.named_modules() if is_float8_layer(module)] == ["blocks.0.up"]


def test_layers_are_chosen_as_in_accelerate() -> None:
    model = Model()
    assert find_first_last_linear_layers(model) == ("first", "last")
    assert filter_linear_layers(model.first, "first", ["last"])
    assert not filter_linear_layers(model.first, "first", ["first"])
    assert not filter_linear_layers(model.odd, "odd", [])
    assert not filter_first_and_last_linear_layers(model.blocks, "norm")
    assert not has_ao_layers(model)
    weights = dict(model.named_parameters())
    convert_model_to_fp8_ao(model)
    assert has_ao_layers(model)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())


def _engine() -> dict[str, Any]:
    """A world of its own with the stand-in for Transformer Engine on its path."""
    sys.path.insert(0, str(STANDINS))
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    te = importlib.import_module("transformer_engine.pytorch")
    losses, model, _ = _losses(accelerator)
    kinds = {name: type(module).__module__.partition(".")[0] for name, module in model.named_modules()}
    model.eval()
    calls = model.get_submodule("first").calls
    trained = list(calls)
    model(torch.ones(1, 16))
    recipe = te.entered[0][1]
    facts = (accelerator.fp8_backend.value, recipe.amax_compute_algo, recipe.fp8_format.value)
    return {
        "losses": losses,
        "replaced": sorted(name for name, kind in kinds.items() if kind == "transformer_engine"),
        "calls": (trained, calls[10:]),
        "facts": facts,
        "output": model(torch.ones(1, 16)).dtype,
        "functions": _functions(te),
    }


def _functions(te: Any) -> list[Any]:
    """Accelerate's functions on a model of their own: wrapped, in evaluation, converted back; and an error."""
    model = Model()
    weights = dict(model.named_parameters())
    convert_model(model, _convert_ln=False)
    seen: list[Any] = [has_transformer_engine_layers(model), type(model.blocks[0].norm).__module__]
    settings = TERecipeKwargs(fp8_format="E5M2", use_autocast_during_eval=True, amax_compute_algo="most_recent")
    apply_fp8_autowrap(model, settings).eval()
    model(torch.ones(2, 16))
    recipe = te.entered[-1][1]
    seen += [te.entered[-1][0], recipe.fp8_format.value, recipe.amax_compute_algo, model.first.calls]
    convert_model(model, to_transformer_engine=False)
    seen += [has_transformer_engine_layers(model), dict(model.named_parameters()).items() == weights.items()]
    with pytest.raises(PrecisionError) as caught:
        apply_fp8_autowrap(model, TERecipeKwargs(use_mxfp8_block_scaling=True))
    return [*seen, str(caught.value)]


def test_transformer_engine_is_called_as_its_interface_asks(fp32: list[float]) -> None:
    env = {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_FORMAT": "E4M3", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max"}
    seen = run_one(_engine, env=env)
    assert seen["losses"] == pytest.approx(fp32, abs=1e-2)
    assert seen["replaced"] == ["blocks.0.down", "blocks.0.norm", "blocks.0.up", "blocks.1.down", "blocks.1.norm",
                                "blocks.1.up", "first"]  # fmt: skip
    assert seen["calls"] == ([True] * 10, [False])
    assert (seen["facts"], seen["output"]) == (("TE", "max", "E4M3"), torch.float32)
    assert seen["functions"] == [
        True, "torch.nn.modules.normalization", True, "E5M2", "most_recent", [True], False, True,
        "TERecipeKwargs(use_mxfp8_block_scaling=True) is not supported here: Device compute capability 10.0 or higher "
        "required for MXFP8 execution.",
    ]  # fmt: skip
