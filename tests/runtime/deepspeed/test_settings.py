"""The settings of DeepSpeed from arguments, variables, files and text, and the contradictions between them."""

from __future__ import annotations

import base64
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import DummyOptim, DummyScheduler
from accel.accelerator.arguments import resolve_accumulation, resolve_deepspeed
from accel.errors import AccelError
from accel.parallel.base import Loading
from accel.parallel.deepspeed_settings import fill
from accel.plugins import GradientAccumulationPlugin
from accel.plugins.deepspeed import DeepSpeedPlugin, HfDeepSpeedConfig
from accel.state import AcceleratorState

_STAGE_3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def _config(**more: Any) -> dict[str, Any]:
    return {**deepcopy(_STAGE_3), **more}


def test_defaults_do_not_clip_and_follow_the_script() -> None:
    plugin = DeepSpeedPlugin()
    stated: Any = (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps)
    assert stated == (2, None, "auto")
    assert (plugin.offload_optimizer_device, plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (
        "none", False, False)  # fmt: skip
    assert "gradient_clipping" not in plugin.deepspeed_config
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"DEEPSPEED_ZERO_STAGE": "3"}, {"zero_stage": 3}),
        ({"DEEPSPEED_ZERO_STAGE": "0"}, {"zero_stage": "0"}),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, {"offload_optimizer_device": "cpu"}),
        (
            {
                "DEEPSPEED_ZERO_STAGE": "3",
                "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
                "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/x",
            },
            {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": Path("/x")},
        ),
        (
            {
                "DEEPSPEED_ZERO_STAGE": "3",
                "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme",
                "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/x",
            },
            {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/x"},
        ),
        ({"GRADIENT_CLIPPING": "0.5"}, {"gradient_clipping": 0.5}),
        ({"GRADIENT_CLIPPING": "auto"}, {"gradient_clipping": "auto"}),
        ({"DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}, {"zero3_save_16bit_model": True}),
        ({"DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_INIT": "false"}, {"zero_stage": 3, "zero3_init_flag": False}),
        ({"DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B"}, {"transformer_moe_cls_names": "A,B"}),
        ({"DEEPSPEED_CONFIG_FILE": "{FILE}"}, {"hf_ds_config": _config(gradient_clipping=0.3)}),
    ],
)
def test_a_variable_equals_its_argument(
    variables: dict[str, str], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_config(gradient_clipping=0.3)))
    expected = DeepSpeedPlugin(**arguments)
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value.replace("{FILE}", str(path)))
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config == expected.deepspeed_config
    for one in (plugin, expected):
        del one.hf_ds_config
    assert vars(plugin) == vars(expected)
    assert len(vars(plugin)) > len(arguments) + 10


def test_a_configuration_is_a_file_a_dict_json_or_base64_text(tmp_path: Path) -> None:
    config = _config(gradient_clipping=0.3, gradient_accumulation_steps=4)
    path, text = tmp_path / "ds.json", json.dumps(config)
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for source in (path, str(path), config, text, encoded, HfDeepSpeedConfig(config)):
        plugin = DeepSpeedPlugin(source)
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (3, 0.3, 4)
    assert "steps_per_print" not in config  # the script's own dict is not written to


def test_fields_fill_auto_and_missing_keys_of_a_configuration() -> None:
    config = {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}
    plugin = DeepSpeedPlugin(config, zero_stage=1, offload_optimizer_device="cpu", gradient_clipping=0.7)
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert plugin.deepspeed_config["gradient_clipping"] == 0.7
    plugin = DeepSpeedPlugin(config)
    assert (plugin.zero_stage, plugin.offload_optimizer_device) == (2, "none")


def test_precision_comes_from_the_configuration_or_fills_it() -> None:
    for keys, requested, precision in (
        ({}, "no", "no"),
        ({}, "bf16", "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "fp16", "fp16"),
        ({"bf16": {"enabled": True}}, "no", "bf16"),
    ):
        plugin = DeepSpeedPlugin(_config(**keys))
        plugin.set_mixed_precision(requested)
        assert plugin.mixed_precision == precision


def test_a_key_is_queried_by_its_path() -> None:
    config = HfDeepSpeedConfig(_config(a={"b": {"c": 0}}))
    assert config.find_config_node("a.b.c") == ({"c": 0}, "c")
    assert config.find_config_node("a.x.c") == (None, "c")
    assert (config.get_value("a.b.c", 5), config.get_value("a.b.d", 5), config.get_value("z.y")) == (0, 5, None)
    assert (config.is_false("a.b.c"), config.is_true("a.b.c"), config.is_false("a.b.d")) == (True, False, False)
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, False)
    config.del_config_sub_tree("a.b")
    config.del_config_sub_tree("a.b")
    assert config.config["a"] == {}


def test_offloaded_parameters_at_stage_2_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="offload_param_device='cpu' has no effect at stage 2: it is for stage 3"):
        plugin = DeepSpeedPlugin(offload_param_device="cpu")
    assert plugin.deepspeed_config["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_a_disk_at_stage_2_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="offload_optimizer_device='nvme' at stage 2 uses the host's memory"):
        DeepSpeedPlugin(offload_optimizer_device="nvme", offload_optimizer_nvme_path="/disk")


def test_every_auto_without_a_value_is_named_in_one_line() -> None:
    plugin: Any = DeepSpeedPlugin(
        _config(optimizer={"params": {"lr": "auto", "eps": "auto"}}, train_micro_batch_size_per_gpu="auto")
    )
    with pytest.raises(AccelError) as error:
        plugin.deepspeed_config_process(must_match=False, **{"optimizer.params.lr": 0.1})
    assert "'auto' in optimizer.params.eps, train_micro_batch_size_per_gpu: set numbers" in str(error.value)
    assert "\n" not in str(error.value)
    plugin.deepspeed_config["optimizer"]["params"]["eps"] = 1e-8
    with pytest.raises(AccelError, match=r"optimizer\.params\.lr is 0\.1 in the configuration, not 0\.2"):
        plugin.deepspeed_config_process(
            **{"optimizer.params.lr": 0.2, "train_micro_batch_size_per_gpu": 4, "zero_optimization.stage": 3}
        )


@pytest.mark.parametrize("placeholder", [True, False])
def test_warming_up_reaches_the_rate_of_each_group(placeholder: bool) -> None:
    model: Any = nn.Linear(2, 2)
    make: Any = DummyOptim if placeholder else torch.optim.SGD
    for bias, expected in ({"lr": 0.5}, [0.1, 0.5]), ({}, 0.1):
        optimizer = make([{"params": [model.weight]}, {"params": [model.bias], **bias}], lr=0.1)
        config = _config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}})
        plugin = DeepSpeedPlugin(config)
        fill(plugin, model, optimizer, DummyScheduler(optimizer), Loading(), world=1, copies=1)
        assert plugin.deepspeed_config["scheduler"]["params"]["warmup_max_lr"] == expected


_MISTAKES: list[tuple[Any, str]] = [
    (lambda: DeepSpeedPlugin(zero_stage=4), "DeepSpeedPlugin(zero_stage=…): '4' is not one of 0, 1, 2, 3"),
    (lambda: DeepSpeedPlugin(gradient_clipping=-1), "gradient_clipping=…): -1 is neither a number of 0 or more nor"),
    (lambda: DeepSpeedPlugin(gradient_accumulation_steps=0), "0 is neither a positive integer nor 'auto'"),
    (lambda: DeepSpeedPlugin(offload_optimizer_device="gpu"), "'gpu' is not one of none, cpu, nvme"),
    (lambda: DeepSpeedPlugin(zero3_save_16bit_model="maybe"), "'maybe' is not one of true, false"),  # type: ignore[arg-type]
    (lambda: DeepSpeedPlugin(offload_optimizer_device="nvme"), "needs offload_optimizer_nvme_path"),
    (lambda: DeepSpeedPlugin(zero_stage=0, offload_optimizer_device="cpu"), "is for stages 1 to 3, not zero_stage=0"),
    (lambda: DeepSpeedPlugin(enable_msamp=True), "MS-AMP is abandoned: use mixed_precision='bf16'"),
    (lambda: DeepSpeedPlugin("nowhere.json"), "'nowhere.json': no such file, nor base64 text of JSON"),
    (lambda: DeepSpeedPlugin('{"a": 1,}'), "line 1: no JSON"),
    (lambda: DeepSpeedPlugin("[1]"), "no such file"),
    (lambda: DeepSpeedPlugin(5), "a int is neither a path nor a dict"),
    (lambda: DeepSpeedPlugin({}), "zero_optimization is missing: set zero_optimization.stage"),
    (lambda: DeepSpeedPlugin(_config(), zero_stage=2),
     "DeepSpeedPlugin(zero_stage=…) is 2, but zero_optimization.stage is 3 in the DeepSpeed configuration: remove one"),
    (lambda: DeepSpeedPlugin(_config(bf16={"enabled": True})).set_mixed_precision("fp16"),
     "mixed_precision='fp16', but bf16 is enabled in the DeepSpeed configuration"),
    (lambda: DeepSpeedPlugin().select(), "call AcceleratorState().select_deepspeed_plugin(name)"),
    (lambda: setattr(DeepSpeedPlugin(), "selected", True), "call AcceleratorState().select_deepspeed_plugin(name)"),
    (lambda: DeepSpeedPlugin().fill_match("train_batch_size"), "there is no value for train_batch_size='auto'"),
    (lambda: HfDeepSpeedConfig({}).del_config_sub_tree("a.b", must_exist=True), "configuration has no a.b"),
    (lambda: resolve_deepspeed(DeepSpeedPlugin(), {"a": DeepSpeedPlugin()}), "deepspeed_plugins, not both"),
    (lambda: resolve_deepspeed({"zero_stage": 2}, None), "or a dict of them by name, not int"),
    (lambda: resolve_deepspeed(None, 5), "must be a DeepSpeedPlugin, or a dict of them by name, not int"),
    (lambda: resolve_accumulation(None, 4, DeepSpeedPlugin(gradient_accumulation_steps=2)),
     "gradient_accumulation_steps is 4 in the script, but 2 in the DeepSpeedPlugin"),
    (lambda: AcceleratorState(cpu=True, deepspeed_plugin=DeepSpeedPlugin(), fsdp_plugin=object()),
     "deepspeed_plugin and fsdp_plugin contradict each other"),
    (lambda: (AcceleratorState(cpu=True), AcceleratorState(deepspeed_plugin=DeepSpeedPlugin())),
     "this process already runs without one"),
    (lambda: (AcceleratorState(cpu=True, deepspeed_plugin=DeepSpeedPlugin()),
              AcceleratorState(deepspeed_plugin=DeepSpeedPlugin())), "this process already has one"),
    (lambda: AcceleratorState(cpu=True, deepspeed_plugin=DeepSpeedPlugin()).select_deepspeed_plugin("a"),
     "there is one plug-in, without a name"),
    (lambda: AcceleratorState(cpu=True, deepspeed_plugin={"a": DeepSpeedPlugin()}).get_deepspeed_plugin("b"),
     "'b' is not one of a"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), _MISTAKES)
def test_a_mistake_is_one_line(make: Any, message: str) -> None:
    with pytest.raises(AccelError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_window_is_deepspeeds_or_the_scripts() -> None:
    for stated, steps, own, expected in (("auto", 4, None, 4), (4, 1, None, 4), (4, 4, None, 4), (4, 1, 4, 4)):
        plugin = None if own is None else GradientAccumulationPlugin(num_steps=own, sync_each_batch=True)
        result = resolve_accumulation(plugin, steps, DeepSpeedPlugin(gradient_accumulation_steps=stated))  # type: ignore[arg-type]
        assert (result.num_steps, result.sync_each_batch) == (expected, own is not None)


def test_a_state_selects_one_of_several_plugins() -> None:
    plugins = {"a": DeepSpeedPlugin(zero_stage=1), "b": DeepSpeedPlugin(zero_stage=2)}
    state = AcceleratorState(cpu=True, deepspeed_plugin=plugins, mixed_precision="bf16")
    assert (str(state.distributed_type), state.mixed_precision) == ("DEEPSPEED", "bf16")
    assert state.deepspeed_plugin is plugins["a"] is state.get_deepspeed_plugin("a")
    state.select_deepspeed_plugin("b")
    assert [plugin.selected for plugin in plugins.values()] == [False, True]
    assert AcceleratorState(deepspeed_plugin=plugins).deepspeed_plugin is plugins["b"]
    AcceleratorState._reset_state()
    assert str(state.distributed_type) == "NO"


def test_unknown_moe_classes_are_named() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(AccelError, match="the model has no module of class Expert"):
        DeepSpeedPlugin(transformer_moe_cls_names="Expert, Linear").set_moe_leaf_modules(torch.nn.Linear(1, 1))
