"""Checks for settings that contradict or require one another. Every message names both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import BY_NAME, GROUPS
from .env_variables import is_in_effect, is_on
from .setting import Group, Setting

Options = Mapping[str, Any]

BACKEND_SWITCHES = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
# Giving both is a contradiction, whatever the values. Between a file and a flag, the flag wins.
PAIRS = (
    ("module", "no_python"),
    ("tpu", "gpu_ids"),
    ("tpu", "mpirun_hostfile"),
    ("mpirun_hostfile", "multi_gpu"),
    ("mpirun_hostfile", "use_deepspeed"),
    ("mpirun_hostfile", "use_fsdp"),
    ("mpirun_hostfile", "use_megatron_lm"),
    ("tpu_use_cluster", "no_tpu_cluster"),
    ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
    ("deepspeed_config_file", "zero_stage"),
    ("deepspeed_config_file", "offload_optimizer_device"),
    ("deepspeed_config_file", "offload_param_device"),
    ("deepspeed_config_file", "zero3_save_16bit_model"),
)


def contradictions(options: Options, sources: Mapping[str, str] | None = None) -> str | None:
    """Return the first contradiction between the settings, in one line, or None.

    sources: where a setting was given if not as a flag, for the message: `{"use_fsdp": "base.yaml:3"}`.
    """
    return next(_find_contradictions(options, sources or {}), None)


def without_effect(explicit: Mapping[str, Any], options: Options) -> list[str]:
    """Return lines that list the settings of `explicit` without effect, grouped by the missing setting."""
    idle: dict[str, list[str]] = {}
    for group in GROUPS:
        for setting in group.settings:
            needed = _prerequisite(group, setting, options)
            if needed and is_given(setting.name, explicit):
                idle.setdefault(needed, []).append(setting.display_name)
    return [f"{', '.join(flags)}: no effect without {needed}" for needed, flags in idle.items()]


def _prerequisite(group: Group, setting: Setting, options: Options) -> str:
    """Return the setting that is required for this one to have an effect, or "" if none is missing."""
    if group.on is not None and not is_on(group, options):
        name, value = group.on
    elif setting.when is not None and not is_in_effect(setting, options) and options[setting.name] != setting.default:
        name, value = setting.when
    else:
        return ""
    return BY_NAME[name].display_name + ("" if value is True else f" {value}")


def _find_contradictions(options: Options, sources: Mapping[str, str]) -> Iterator[str]:
    def label(name: str) -> str:
        setting = BY_NAME[name]
        value = options[name]
        shown = str(value).lower() if isinstance(value, bool) else value
        text = setting.display_name if setting.kind == "switch" else f"{setting.display_name} {shown}"
        return text + (f" ({sources[name]})" if name in sources else "")

    switches = [name for name in BACKEND_SWITCHES if is_given(name, options)]
    on_cpu = len(switches) == 2 and switches[0] == "cpu" and switches[1].startswith("use_")
    pairs = [(switches[0], switches[1])] if len(switches) > 1 and not on_cpu else []
    for first, second in [*pairs, *(pair for pair in PAIRS if all(is_given(name, options) for name in pair))]:
        yield f"{label(first)} and {label(second)} contradict each other: keep one"
    for rule in (_precision, _port, _gpus, _fsdp, _parallelism, _sizes, _nvme, _fp8, _keys, _variables):
        yield from rule(options, label)


def is_given(name: str, options: Options) -> bool:
    """Return True if the setting requests anything."""
    value = options.get(name)
    return not (value is None or value is False or value == "" or (name == "gpu_ids" and value == "all"))


def _precision(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if options["cpu"] and options["mixed_precision"] == "fp16":
        yield f"{label('mixed_precision')} needs a GPU and {label('cpu')} uses none: use bf16 or no"


def _port(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    port = options["main_process_port"] or 0
    if port > 65535:
        yield f"{label('main_process_port')}: the highest port is 65535"


_GPU = re.compile(r"\d+(\.\d+)?|(GPU|MIG)-[\w/-]+", re.ASCII)


def _gpus(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if is_given("gpu_ids", options) and not all(_GPU.fullmatch(gpu.strip()) for gpu in options["gpu_ids"].split(",")):
        yield f"{label('gpu_ids')}: expects numbers or UUIDs such as GPU-8932f937, separated by commas"


SIZES = tuple(f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"))


def _sizes(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if not (options["use_parallelism_config"] and options["num_processes"]):
        return
    names = [name for name in SIZES if options[name] > 1]
    product = math.prod(options[name] for name in names)
    # Without dp_shard_size, the shards of a replica are what the other sizes leave.
    open_size = options["use_fsdp"] and "parallelism_config_dp_shard_size" not in names
    rest = options["num_processes"] // product if open_size else 1
    if names and product * rest != options["num_processes"]:
        sizes = " times ".join(label(name) for name in names)
        yield f"{label('num_processes')} and {sizes} contradict each other: the sizes' product is {product}"


def _fsdp(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if not options["use_fsdp"]:
        return
    if options["fsdp_cpu_ram_efficient_loading"] and not options["fsdp_sync_module_states"]:
        yield (
            f"{label('fsdp_cpu_ram_efficient_loading')} and {label('fsdp_sync_module_states')} contradict each other: "
            "ranks that have not read the weights must receive them"
        )
    if options["fsdp_activation_checkpointing_offload"]:
        if not options["fsdp_activation_checkpointing"]:
            yield f"{label('fsdp_activation_checkpointing_offload')} needs --fsdp_activation_checkpointing true"
        if options["fsdp_version"] == "1":
            yield f"{label('fsdp_activation_checkpointing_offload')} needs --fsdp_version 2"


def _parallelism(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if not options["use_parallelism_config"] or options["use_deepspeed"]:
        return
    if options["use_fsdp"] and options["fsdp_version"] == "1":
        yield f"{label('use_parallelism_config')} and {label('fsdp_version')} contradict each other: it needs version 2"


def _nvme(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    for kind in ("optimizer", "param"):
        device, path = f"offload_{kind}_device", f"offload_{kind}_nvme_path"
        if options["use_deepspeed"] and options[device] == "nvme" and not options[path]:
            yield f"{label(device)} needs --{path}"


def _fp8(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    if options["fp8_backend"] and options["mixed_precision"] not in (None, "fp8"):
        yield f"{label('fp8_backend')} and {label('mixed_precision')} contradict each other: it needs fp8"
    if options["fp8_backend"] == "msamp":
        yield f"{label('fp8_backend')}: MS-AMP, which is no longer developed, is not supported: use ao (torchao) or te"


def _keys(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    names = ("aws_access_key_id", "aws_secret_access_key")
    present = [name for name in names if options[name]]
    if len(present) == 1:
        yield f"--{present[0]} needs --{names[1 - names.index(present[0])]}"


def _variables(options: Options, label: Callable[[str], str]) -> Iterator[str]:
    for pair in options["env"] or []:
        name, equals, _ = pair.partition("=")
        if not (name and equals):
            yield f"--env {pair}: expects NAME=VALUE"
