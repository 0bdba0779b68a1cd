"""The environment variables for the settings in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import GROUPS
from .setting import Group, Setting, env_text

# Settings whose variables the launcher computes: they depend on the machine too.
_COMPUTED = {"cpu", "gpu_ids", "main_process_ip", "main_process_port", "num_cpu_threads_per_process", "rdzv_id",
              "role", "max_restarts", "compat"}  # fmt: skip
_NOT_EXPORTED = {"Amazon SageMaker"}


def variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that Accelerate's launcher sets and `Accelerator()` reads, accel's and Hugging Face's.

    `options` are the values of the settings by name. A setting that is not given leaves its variable as it is.
    """
    env: dict[str, str] = {}
    for group in GROUPS:
        if group.title not in _NOT_EXPORTED and is_on(group, options):
            for setting in group.settings:
                if setting.env and setting.name not in _COMPUTED and _is_exported(setting, options):
                    env |= _variable(setting, options[setting.name])
    return env | _tpu_variables(options) | _deepspeed_variables(options)


def is_on(group: Group, options: Mapping[str, Any]) -> bool:
    """Return True if the settings of this group have an effect."""
    return group.on is None or options.get(group.on[0]) == group.on[1]


def _is_exported(setting: Setting, options: Mapping[str, Any]) -> bool:
    value = options.get(setting.name)
    if value is None or (value is False and setting.kind == "switch" and setting.style != "str"):
        return False
    return is_in_effect(setting, options)


def is_in_effect(setting: Setting, options: Mapping[str, Any]) -> bool:
    """Return True if the setting's condition (`when`) holds."""
    if setting.when is None:
        return True
    value = options.get(setting.when[0])
    if isinstance(setting.when[1], bool):
        return value not in (None, "no")
    return isinstance(value, int) and value >= setting.when[1]


def _variable(setting: Setting, value: Any) -> dict[str, str]:
    if setting.name == "fp8_override_linear_precision":  # one setting, three variables
        names = ("FPROP", "DGRAD", "WGRAD")
        return {f"ACCELERATE_FP8_OVERRIDE_{name}": str(part) for name, part in zip(names, value, strict=True)}
    return {setting.env: env_text(setting, value)}


def _tpu_variables(options: Mapping[str, Any]) -> dict[str, str]:
    if not options["tpu"] or options["mixed_precision"] != "bf16" or options["downcast_bf16"]:
        return {}
    return {"XLA_USE_BF16": "1"}


def _deepspeed_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of DeepSpeed settings given in a file, which must agree with DeepSpeed's own configuration."""
    if not options["use_deepspeed"]:
        return {}
    return {"ACCELERATE_CONFIG_DS_FIELDS": options.get("deepspeed_fields_from_accelerate_config", "")}
