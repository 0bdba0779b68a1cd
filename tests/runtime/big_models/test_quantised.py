"""Models with layers of bitsandbytes, in 8 and 4 bits: the same numbers as its layers by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.big_models import init_empty_weights
from accel.big_models.load import load_checkpoint_in_model, quantize_and_offload_8bit
from accel.big_models.module_tensors import tensor_named
from accel.big_models.offload import load_offloaded_weight
from accel.big_models.quantised import (
    get_keys_to_not_convert,
    get_quantized_model_device_map,
    has_4bit_bnb_layers,
    load_and_quantize_model,
    replace_with_bnb_layers,
)
from accel.errors import AccelError, ArgumentError, CheckpointError
from accel.plugins.bnb import BnbQuantizationConfig
from tests.needs import package

bnb: Any = package("bitsandbytes")

_WIDTH = 64
_INPUTS = torch.randn(5, _WIDTH, generator=torch.Generator().manual_seed(1))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return out


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model().eval()


def _empty() -> _Model:
    with init_empty_weights():
        return _Model().eval()


def _config(bits: int, **more: Any) -> BnbQuantizationConfig:
    """In float32 throughout, so that nothing but the quantised weights differs."""
    if bits == 8:
        return BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32", **more)
    return BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32", **more)


_KINDS: dict[str, tuple[BnbQuantizationConfig, Callable[[nn.Linear], nn.Module]]] = {
    "int8": (
        _config(8),
        lambda linear: bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, threshold=6.0
        ),
    ),
    "fp4": (
        _config(4),
        lambda linear: bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, False, "fp4"
        ),
    ),
    "nf4": (
        _config(4, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        lambda linear: bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, torch.float32, True, "nf4"
        ),
    ),
}  # fmt: skip


def _by_hand(kind: str) -> nn.Module:
    """As bitsandbytes' own documents do it: a layer with the weights, moved to a device."""
    model = _model()
    for block in model.blocks:
        for name in ("up", "down"):
            linear = getattr(block, name)
            layer = _KINDS[kind][1](linear)
            layer.load_state_dict(linear.state_dict())
            setattr(block, name, layer)
    return model.eval().to("cpu")


def _run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(_INPUTS)
    return out


def _saved(folder: Path) -> Path:
    Accelerator(cpu=True).save_model(_model(), folder, max_shard_size="40KB")
    return folder


@pytest.mark.parametrize("kind", list(_KINDS))
def test_weights_of_a_checkpoint_and_of_a_model_are_quantised_as_by_hand(kind: str, tmp_path: Path) -> None:
    expected = _run(_by_hand(kind))
    config = _KINDS[kind][0]
    loaded: Any = load_and_quantize_model(_empty(), config, _saved(tmp_path / "saved"))
    assert torch.equal(_run(loaded), expected)
    assert torch.equal(_run(load_and_quantize_model(_model(), config)), expected)
    assert (loaded.is_loaded_in_8bit, loaded.is_loaded_in_4bit) == (kind == "int8", kind != "int8")
    assert has_4bit_bnb_layers(loaded) == (kind != "int8")
    assert type(loaded.head) is nn.Linear, "the head is not quantised"
    assert config.skip_modules is None, "the caller's configuration did not change"
    weight = loaded.get_submodule("blocks.0.up").weight
    assert weight.dtype in (torch.int8, torch.uint8)
    assert not weight.requires_grad


@pytest.mark.parametrize("kind", list(_KINDS))
def test_what_is_saved_loads_again(kind: str, tmp_path: Path) -> None:
    """The parts of one weight are in several files. The model did not run: see docs/big_models.md on its scales."""
    config = _KINDS[kind][0]
    model = load_and_quantize_model(_model(), config)
    Accelerator(cpu=True).save_model(model, tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = load_and_quantize_model(_empty(), config, tmp_path)
    assert torch.equal(_run(again), _run(load_and_quantize_model(_model(), config)))


@pytest.mark.parametrize("saved", [False, True], ids=["quantised here", "quantised before"])
def test_weights_in_8_bits_on_the_disk(saved: bool, tmp_path: Path) -> None:
    config = _config(8)
    checkpoint = tmp_path / "saved"
    model = load_and_quantize_model(_model(), config)
    expected = _run(model)
    Accelerator(cpu=True).save_model(model if saved else _model(), checkpoint)
    places = {"blocks.0": "cpu", "blocks.1": "disk", "norm": "cpu", "head": "cpu"}
    loaded: Any = load_and_quantize_model(_empty(), config, checkpoint, places, offload_folder=tmp_path / "offloaded")
    layer = loaded.blocks[1].up
    assert layer.weight.is_meta
    for _ in range(2):
        assert torch.equal(_run(loaded), expected)
        assert layer.weight.is_meta
        assert layer.state.CB is None, "nothing of an offloaded weight stays in memory"


def test_offloaded_modules_of_a_model_in_4_bits_are_not_quantised(tmp_path: Path) -> None:
    places = {"blocks.0": "cpu", "blocks.1": "disk", "norm": "cpu", "head": "cpu"}
    checkpoint = _saved(tmp_path / "saved")
    loaded: Any = load_and_quantize_model(_empty(), _config(4), checkpoint, places, offload_folder=tmp_path / "folder")
    assert has_4bit_bnb_layers(loaded.blocks[0])
    assert not has_4bit_bnb_layers(loaded.blocks[1])
    by_hand = _model()
    by_hand.blocks[0] = _by_hand("fp4").get_submodule("blocks.0")
    assert torch.equal(_run(loaded), _run(by_hand))


def test_types_of_the_other_weights() -> None:
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", skip_modules=["down"], keep_in_fp32_modules=["norm"]
    )
    model = load_and_quantize_model(_model(), config)
    types = {name: param.dtype for name, param in model.named_parameters()}
    assert types["blocks.0.down.weight"] == torch.bfloat16
    assert types["norm.weight"] == torch.float32
    assert types["blocks.0.up.weight"] == types["head.weight"] == torch.uint8


def test_modules_with_tied_weights_and_the_last_one_are_kept() -> None:
    model: Any = _model()
    assert get_keys_to_not_convert(model) == ["head"]
    model.base_model_prefix = "base"
    assert get_keys_to_not_convert(model) == []
    embedding = nn.Embedding(8, _WIDTH)
    tied = nn.ModuleDict({"embedding": embedding, "body": nn.Linear(_WIDTH, _WIDTH), "head": nn.Linear(_WIDTH, 8)})
    tied["head"].weight = embedding.weight
    assert sorted(get_keys_to_not_convert(tied)) == ["embedding", "head"]


def test_a_subclass_of_linear_keeps_its_forward(caplog: pytest.LogCaptureFixture) -> None:
    attention = nn.MultiheadAttention(_WIDTH, 4)
    with caplog.at_level(logging.WARNING):
        replace_with_bnb_layers(attention, _config(8))
    assert type(attention.out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    assert "MultiheadAttention has no torch.nn.Linear to quantise" in caplog.text


def test_a_map_by_strategy_counts_quantised_weights() -> None:
    config = _config(4, skip_modules=["head"], keep_in_fp32_modules=[])
    model = replace_with_bnb_layers(_empty(), config, ["head"])
    room: dict[int | str, int | str] = {"cpu": 22_000}  # 2 blocks of 16,384 weights in 4 bits, and 5 KB in float32
    assert set(get_quantized_model_device_map(model, config, "auto", room).values()) == {"cpu"}
    with pytest.raises(ArgumentError, match="would be offloaded, and layers in 4 bits cannot be"):
        get_quantized_model_device_map(model, config, "sequential", {"cpu": 14_000})
    assert get_quantized_model_device_map(model, config) == {"": "cpu"}


def test_one_weight_is_offloaded_with_its_scales(tmp_path: Path) -> None:
    model = replace_with_bnb_layers(_empty(), _config(8))
    index: dict[str, Any] = {}
    values = torch.randn(2 * _WIDTH, _WIDTH)
    quantize_and_offload_8bit(model, values, "blocks.0.up.weight", torch.float16, tmp_path, index, None)
    assert set(index) == {"blocks.0.up.weight", "blocks.0.up.SCB"}
    int8 = load_offloaded_weight(tmp_path / "blocks.0.up.weight.dat", index["blocks.0.up.weight"])
    scales = load_offloaded_weight(tmp_path / "blocks.0.up.SCB.dat", index["blocks.0.up.SCB"])
    assert torch.allclose(int8 * scales[:, None] / 127, values, atol=0.02)
    weight = tensor_named(model, "blocks.0.up.weight")
    assert weight is not None
    assert (weight.device.type, weight.dtype) == ("meta", torch.int8)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    checkpoint = _saved(tmp_path / "saved")
    in_4_bits = tmp_path / "in-4-bits"
    Accelerator(cpu=True).save_model(load_and_quantize_model(_model(), _config(4)), in_4_bits)
    model = replace_with_bnb_layers(_empty(), _config(8))
    calls: list[tuple[type[AccelError], str, Callable[[], object]]] = [
        (ArgumentError, "neither of load_in_8bit", BnbQuantizationConfig),
        (ArgumentError, "both of load_in_8bit", lambda: BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True)),
        (ArgumentError, "bnb_4bit_quant_type", lambda: _config(4, bnb_4bit_quant_type="np4")),
        (ArgumentError, "skip_modules='head' is not a list", lambda: _config(8, skip_modules="head")),
        (ArgumentError, "torch_dtype", lambda: BnbQuantizationConfig(load_in_8bit=True, torch_dtype="half")),
        (ArgumentError, "pass weights_location", lambda: load_and_quantize_model(_empty(), _config(8))),
        (ArgumentError, "device_map", lambda: load_and_quantize_model(_empty(), _config(8), checkpoint, "equal")),
        (CheckpointError, "in 4 bits: load it with load_and", lambda: load_checkpoint_in_model(_empty(), in_4_bits)),
        (
            ArgumentError,
            "norm.weight cannot be offloaded",
            lambda: quantize_and_offload_8bit(model, torch.ones(_WIDTH), "norm.weight", None, tmp_path, {}, None),
        ),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_weights_beside_the_quantised_ones_train() -> None:
    accelerator = Accelerator(cpu=True)
    model = load_and_quantize_model(_model(), _config(4, bnb_4bit_quant_type="nf4"))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    losses = []
    for _ in range(5):
        loss = model(_INPUTS).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
