"""What is said about sharding, as arguments, by variables, and in the words of version 1."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from accel import Accelerator
from accel.errors import AccelError, ArgumentError
from accel.plugins.fsdp import PREFETCHES, STATES, STRATEGIES, WRAPS
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accel.settings.schema import FSDP
from accel.state import PartialState
from tests.runtime.worlds import run


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def test_what_is_not_said() -> None:
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.hybrid, plugin.whole) == (2, True, False, False)
    assert isinstance(plugin.cpu_offload, OffloadPolicy)
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert (plugin.wraps, plugin.auto_wrap_policy, plugin.activation_checkpointing) == (None, None, False)


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({"RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
        ({"RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, {"reshard_after_forward": "shard_grad_op"}),
        ({"RESHARD_AFTER_FORWARD": "HYBRID_SHARD"}, {"reshard_after_forward": ShardingStrategy.HYBRID_SHARD}),
        ({"OFFLOAD_PARAMS": "true"}, {"cpu_offload": CPUOffload(offload_params=True)}),
        ({"OFFLOAD_PARAMS": "true"}, {"cpu_offload": True}),
        ({"STATE_DICT_TYPE": "FULL_STATE_DICT"}, {"state_dict_type": StateDictType.FULL_STATE_DICT}),
        ({"STATE_DICT_TYPE": "1"}, {"state_dict_type": "full_state_dict"}),
        ({"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "A,B"},
         {"transformer_cls_names_to_wrap": ["A", "B"]}),
        ({"AUTO_WRAP_POLICY": "2", "MIN_NUM_PARAMS": "20"},
         {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}),
        ({"AUTO_WRAP_POLICY": "NO_WRAP"}, {"auto_wrap_policy": "no_wrap"}),
        ({"ACTIVATION_CHECKPOINTING": "1", "ACTIVATION_CHECKPOINTING_OFFLOAD": "yes"},
         {"activation_checkpointing": True, "activation_checkpointing_offload": True}),
        ({"CPU_RAM_EFFICIENT_LOADING": "True"}, {"cpu_ram_efficient_loading": True}),
        ({"FORWARD_PREFETCH": "true"}, {"forward_prefetch": True}),
        ({"IGNORED_MODULES": "head.*"}, {"ignored_modules": "head.*"}),
    ],
)  # fmt: skip
def test_a_variable_says_what_an_argument_does(
    variables: dict[str, str], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Plugin(**arguments)
    for name, value in variables.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    read = Plugin()
    for plugin in (said, read):
        plugin.sharding_strategy = None  # keeps what was given
    assert vars(read) == vars(said)
    assert vars(read) != vars(Plugin(reshard_after_forward=17))


_ENUMS = [
    ("sharding_strategy", "SHARDING_STRATEGY", STRATEGIES),
    ("backward_prefetch", "BACKWARD_PREFETCH", PREFETCHES),
    ("state_dict_type", "STATE_DICT_TYPE", STATES),
    ("auto_wrap_policy", "AUTO_WRAP_POLICY", WRAPS),
]


@pytest.mark.filterwarnings("ignore:FullyShardedDataParallelPlugin")
@pytest.mark.parametrize(
    ("argument", "variable", "number", "name"),
    [
        (argument, variable, number, name)
        for argument, variable, names in _ENUMS
        for number, name in enumerate(names, 1)
        if name != "LOCAL_STATE_DICT"
    ],
)
def test_an_enum_is_read_by_number_and_name_from_variables_and_arguments(
    argument: str, variable: str, number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[dict[str, Any]] = [{argument: value} for value in (name, name.lower(), number)]
    plugins = [Plugin(1, **way) for way in ways]
    for value in (name, str(number)):
        monkeypatch.setenv(f"FSDP_{variable}", value)
        plugins.append(Plugin(1))
    for plugin in plugins:
        plugin.sharding_strategy = None  # keeps what was given
    assert [vars(plugin) for plugin in plugins] == [vars(plugins[0])] * 5


@pytest.mark.parametrize(
    ("strategy", "reshard", "hybrid"),
    [("FULL_SHARD", True, False), ("SHARD_GRAD_OP", False, False), ("HYBRID_SHARD", True, True),
     ("HYBRID_SHARD_ZERO2", False, True), (ShardingStrategy._HYBRID_SHARD_ZERO2, False, True), (2, False, False)],
)  # fmt: skip
def test_a_strategy_of_version_1_is_what_it_shards(strategy: Any, reshard: bool, hybrid: bool) -> None:
    plugin = Plugin(sharding_strategy=strategy)
    assert (plugin.reshard_after_forward, plugin.hybrid, plugin.whole) == (reshard, hybrid, False)
    assert plugin.sharding_strategy == strategy


def test_version_1_is_read_as_2_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "2")
    old: Any = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plugin = Plugin(
            1, backward_prefetch=BackwardPrefetch.BACKWARD_POST, limit_all_gathers=False, use_orig_params=False,
            mixed_precision_policy=old,
        )  # fmt: skip
    assert [str(warning.message) for warning in said] == [
        "FullyShardedDataParallelPlugin: fsdp_version=1: models are sharded by fully_shard (version 2); "
        "backward_prefetch=BACKWARD_POST: parameters are gathered ahead of the backward pass; "
        "limit_all_gathers=False: they are always limited; "
        "use_orig_params=False: parameters stay the script's own; "
        "buffer_dtype: buffers keep their type. docs/migrating.md has all settings"
    ]
    assert said[0].filename == __file__
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with pytest.warns(UserWarning, match="NO_SHARD: models are trained by DDP"):
        assert Plugin(sharding_strategy="NO_SHARD").whole


def test_a_precision_is_a_name_a_policy_or_its_fields() -> None:
    wanted = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for said in (
        "bf16",
        torch.bfloat16,
        {"param_dtype": "bf16"},
        {"param_dtype": torch.bfloat16, "reduce_dtype": "fp32"},
        wanted,
    ):
        assert Plugin(mixed_precision_policy=said).mixed_precision_policy == wanted
    with pytest.raises(ArgumentError, match="'fp6' is not one of fp32, no, bf16, fp16"):
        Plugin(mixed_precision_policy="fp6")
    with pytest.raises(ArgumentError, match=r"'parm_dtype' is not one of .* did you mean 'param_dtype'"):
        Plugin(mixed_precision_policy={"parm_dtype": "bf16"})


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VERSION", "3", "environment variable FSDP_VERSION: '3' is not one of 1, 2"),
        ("SHARDING_STRATEGY", "ful_shard", "SHARDING_STRATEGY: 'ful_shard' is not one of FULL_SHARD, .*mean"),
        ("RESHARD_AFTER_FORWARD", "fals", "AFTER_FORWARD: 'fals' is not one of FULL_SHARD"),
        ("STATE_DICT_TYPE", "LOCAL_STATE_DICT", "LOCAL_STATE_DICT holds flat parameters: use SHARDED_STATE_DICT"),
        (
            "AUTO_WRAP_POLICY",
            "SIZE",
            "FSDP_AUTO_WRAP_POLICY: 'SIZE' is not one of TRANSFORMER_BASED_WRAP, SIZE",
        ),
        ("OFFLOAD_PARAMS", "perhaps", "FSDP_OFFLOAD_PARAMS='perhaps' is neither yes nor no"),
        ("MIN_NUM_PARAMS", "many", "FSDP_MIN_NUM_PARAMS='many'"),
        ("ACTIVATION_CHECKPOINTING_OFFLOAD", "1", "needs activation_checkpointing=True"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"FSDP_{variable}", value)
    with pytest.raises(AccelError, match=words):
        Plugin()


def test_sizes_are_read_and_are_1_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    config = ParallelismConfig(dp_shard_size=2)
    assert (config.dp_replicate_size, config.total_size, config.tp_size) == (3, 6, 1)
    assert (config.dp_dim_names, config.fsdp_dim_names) == (
        ["dp_replicate", "dp_shard"],
        ["dp_replicate", "dp_shard_cp"],
    )
    with pytest.raises(ArgumentError, match=r"ParallelismConfig\(tp_size=0\): expects a whole number of 1 or more"):
        ParallelismConfig(tp_size=0)
    with pytest.raises(ArgumentError, match=r"ParallelismConfig\(cp_backend=…\): 'ring' is not one of torch"):
        ParallelismConfig(cp_backend="ring")
    with pytest.raises(ArgumentError, match="pass the config to an Accelerator first"):
        config.get_device_mesh()


def test_settings_of_split_sequences_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ParallelismConfig(sp_size=2).sp_handler == DeepSpeedSequenceParallelConfig(None, True, None)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    with pytest.raises(ArgumentError, match=r"sp_seq_length_is_variable=False\) needs sp_seq_length"):
        DeepSpeedSequenceParallelConfig()
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "64")
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(64, False, None)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "eager")
    with pytest.raises(ArgumentError, match="PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION: 'eager' is not one of"):
        ParallelismConfig(sp_size=2)


def test_settings_of_split_layers_are_checked() -> None:
    with pytest.warns(UserWarning, match=r"enable_async_tp=True\) has no effect: collectives of split layers are sync"):
        handler = TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.raises(ArgumentError, match=r"tp_handler=…. must be a TorchTensorParallelConfig, not dict"):
        ParallelismConfig(tp_size=2, tp_handler={})
    assert ParallelismConfig(tp_size=2, tp_handler=handler).to_json() == {
        **dict.fromkeys(("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size"), 1),
        **dict.fromkeys(("cp_handler", "sp_handler")),
        "tp_size": 2,
        "tp_handler": {"enable_async_tp": True},
        "cp_backend": "torch",
        "sp_backend": "deepspeed",
    }
    with pytest.raises(ArgumentError, match="an Accelerator creates the mesh: pass tp_size only"):
        TorchTensorParallelPlugin(2, torch_device_mesh=object())  # type: ignore[arg-type]


def _meshes() -> list[object]:
    """Meshes of two processes, before any `Accelerator` and with the older plug-in, and the error of other sizes."""
    PartialState(cpu=True)
    config = ParallelismConfig(cp_size=2)
    built = config.get_device_mesh("cpu")
    plugin = TorchTensorParallelPlugin(tp_size=2)
    accelerator = Accelerator(torch_tp_plugin=plugin)
    assert plugin.torch_device_mesh is not None
    assert accelerator.state.torch_tp_plugin is plugin
    with pytest.raises(ArgumentError, match="tp_size=4 is 4, but this world has 2 processes"):
        ParallelismConfig(tp_size=4).build_device_mesh("cpu")
    return [
        built["cp"].size(),
        built is config.get_device_mesh(),
        plugin.torch_device_mesh.size(),
        accelerator.tensor_parallel_rank,
    ]


def test_meshes_of_a_configuration_and_of_the_older_plug_in() -> None:
    assert run(_meshes) == [[2, True, 2, 0], [2, True, 2, 1]]
    assert ParallelismConfig().build_device_mesh("cpu") is None


def test_the_documentation_has_every_setting() -> None:
    text = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()
    table = text.partition("## All settings")[2].partition("\n## ")[0]
    shown = set(re.findall(r"`(\w+)`", table)) | set(re.findall(r"--(\w+)", table))
    arguments = {field.name for field in fields(Plugin) if field.init} - {
        "state_dict_config",
        "optim_state_dict_config",
    }
    flags = {setting.name for setting in FSDP.settings}
    variables = {setting.env for setting in FSDP.settings}
    assert (arguments | flags | variables) - shown == set()
