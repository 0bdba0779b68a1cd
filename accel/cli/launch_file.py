"""Reading a configuration file of Accelerate's form as flags of `accel launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .words import UsageError

if TYPE_CHECKING:
    from accel.launch.options import Option

_RENAMED = {"use_cpu": "cpu"}
_SECTIONS = ("dynamo_config",)  # their keys are flags too
_WAYS_NOT_HERE = (
    "deepspeed_config",
    "fsdp_config",
    "megatron_lm_config",
    "parallelism_config",
    "sagemaker_inputs_file",
)
# What every such file has and `accel launch` has no use for, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU"),
    "downcast_bf16": ("no", False),
    "enable_cpu_affinity": (False,),
    "main_training_function": ("main",),
    "tpu_env": ([],),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
}
_NOTHING: tuple[Any, ...] = (None, "", {}, [])


def read_flags(command: str, path: str) -> list[str]:
    """The file's settings as flags of `accel launch`. Raises UsageError for a file or a setting that it cannot take."""
    from accel.launch.options import GROUPS
    from schedulers.errors import nearest

    options = {option.name: option for group in GROUPS.values() for option in group}
    flags = []
    for key, value in _settings(command, path).items():
        name = _RENAMED.get(key, key)
        if key in _WAYS_NOT_HERE:
            if value not in _NOTHING:
                raise UsageError(command, f"{path}: {key}: this way of training is not in this version of accel")
        elif name in options:
            flags += _flag(options[name], value)
        elif key not in _NEUTRAL:
            raise UsageError(command, f"{path}: unknown setting {key!r}{nearest(key, [*options, *_NEUTRAL])}")
        elif value not in (*_NEUTRAL[key], *_NOTHING):
            raise UsageError(command, f"{path}: {key}: {value!r} is not in this version of accel")
    return flags


def _settings(command: str, path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path) as file:
            found = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(command, f"--config_file: cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UsageError(command, f"--config_file: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(command, f"--config_file: {path} must hold settings, one `name: value` a line")
    for section in _SECTIONS:
        found |= found.pop(section, None) or {}
    return found


def _flag(option: Option, value: Any) -> list[str]:
    if value in _NOTHING or value is False:
        return []
    if option.kind is bool:
        return [f"--{option.name}"]
    return [f"--{option.name}={str(value).lower() if option.choices else value}"]
