"""The keys of the configuration file, in every version of Accelerate since 0.11, and how it is written.

Here a file is a mapping. The caller reads it and knows the lines of its keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME, GROUPS, Setting
from .setting import BadValue, as_written, read

# section -> key -> setting.
_SECTIONS: dict[str, dict[str, Setting]] = {}
for _group in GROUPS:
    _SECTIONS.setdefault(_group.section, {}).update({s.file_key: s for s in _group.settings if s.file_key})
_PREFIXES = {group.section: group.prefix for group in GROUPS if group.section}

# Keys of older versions: (section, key) -> (section, key) of today.
_RENAMED = {
    ("", "dynamo_backend"): ("dynamo_config", "dynamo_backend"),
    ("", "fp16"): ("", "mixed_precision"),
    ("fsdp_config", "fsdp_backward_prefetch_policy"): ("fsdp_config", "fsdp_backward_prefetch"),
    ("fsdp_config", "backward_prefetch_policy"): ("fsdp_config", "fsdp_backward_prefetch"),
    ("fp8_config", "amax_history_length"): ("fp8_config", "fp8_amax_history_len"),
    ("fp8_config", "amax_compute_algorithm"): ("fp8_config", "fp8_amax_compute_algo"),
    ("fp8_config", "optimization_level"): ("fp8_config", "fp8_opt_level"),
    ("fp8_config", "backend"): ("fp8_config", "fp8_backend"),
    ("deepspeed_config", "gradient_accumulation_steps"): ("", "gradient_accumulation_steps"),
    ("tp_config", "tp_size"): ("parallelism_config", "parallelism_config_tp_size"),
}
# Keys of older versions that nothing reads any more.
_REMOVED_KEYS = {("", "ipex_config"), ("", "use_xpu"), ("mpirun_config", "mpirun_ccl"), ("", "use_mps_device")}
# Sections in which Accelerate passes over unknown keys, so that files have keys that nothing has ever read:
# https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/launch.py (_validate_launch_command)
# Section -> the prefix that Accelerate gives its keys; it then sets them, of whatever group they are.
_TOLERANT = {"deepspeed_config": "", "fsdp_config": "fsdp_", "megatron_lm_config": "", "dynamo_config": "dynamo_"}
_NEAR_MISS = 0.8  # difflib's ratio above which an unknown key there is a misspelling
_OLD_VALUES: dict[str, dict[object, str]] = {
    "mixed_precision": {True: "fp16"},
    "distributed_type": {"TPU": "XLA", "MPS": "NO", "TP": "MULTI_GPU", False: "NO"},
    "compute_environment": {"CUSTOM_CLUSTER": "LOCAL_MACHINE"},
    "fp8_backend": {"NO": "", False: ""},
    "deepspeed_config_file": {"none": ""},
}
_NOT_GIVEN: tuple[object, ...] = (None, "", [], {})
# Keys that Accelerate writes into every file.
_ALWAYS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "NO", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "no",
    "num_machines": 1, "rdzv_backend": "static", "same_network": False, "tpu_env": [],
    "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
_ALWAYS_ON_SAGEMAKER: dict[str, Any] = {
    "compute_environment": "AMAZON_SAGEMAKER", "base_job_name": "accelerate-sagemaker-1", "debug": False,
    "distributed_type": "NO", "enable_cpu_affinity": False, "gpu_ids": "all", "mixed_precision": "no",
    "num_machines": 1, "py_version": "py38", "pytorch_version": "1.10.2", "region": "us-east-1",
    "transformers_version": "4.17.0", "use_cpu": False,
}  # fmt: skip

UNSET_PROCESSES = -1  # a file that leaves the number of processes to the command line


class BadEntry(ValueError):
    """A key or value that is valid in no version of the file. `keys` locate it; the message does not repeat them."""

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


class Entry(NamedTuple):
    """A setting in a file: its value and its keys there."""

    value: Any
    keys: tuple[str, ...]


def read_document(document: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the settings of a file of any version, by name, in the file's order. Raises BadEntry."""
    entries: dict[str, Entry] = {}
    for key, value in document.items():
        if key in _PREFIXES or key == "tp_config":
            _read_section(key, value, entries)
        else:
            _read_key("", key, value, (key,), entries)
    return entries


def to_document(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file for `values` (settings by name), as today's version writes it. None means not given."""
    on_sagemaker = values.get("compute_environment") == "AMAZON_SAGEMAKER"
    document = dict(_ALWAYS_ON_SAGEMAKER if on_sagemaker else _ALWAYS)
    if values.get("deepspeed_config_file") is not None and values.get("mixed_precision") is None:
        del document["mixed_precision"]  # DeepSpeed's own configuration sets it
    if not on_sagemaker and values.get("num_processes") is None:
        del document["distributed_type"]  # with NO it would be one process instead of one per GPU
    for section, settings in _SECTIONS.items():
        fields = {key: _plain(s, values[s.name]) for key, s in settings.items() if values.get(s.name) is not None}
        if section == "dynamo_config" and values.get("dynamo_backend") in (None, "no"):
            continue
        if section and fields:
            document[section] = fields
        elif not section:
            document |= fields
    if isinstance(document.get("downcast_bf16"), bool):
        document["downcast_bf16"] = "yes" if document["downcast_bf16"] else "no"
    steps = values.get("gradient_accumulation_steps")
    if steps is not None:
        document.setdefault("deepspeed_config", {})["gradient_accumulation_steps"] = steps
    return document


def _read_section(section: str, content: Any, entries: dict[str, Entry]) -> None:
    if content in _NOT_GIVEN:
        return
    if not isinstance(content, Mapping):
        raise BadEntry((section,), f"{section} must hold settings, not {as_written(content)}")
    for key, value in content.items():
        if not is_unread(section, key):
            _read_key(section, key, value, (section, str(key)), entries)


def _read_key(section: str, key: Any, value: Any, keys: tuple[str, ...], entries: dict[str, Entry]) -> None:
    if (section, key) in _REMOVED_KEYS:
        return
    setting = setting_of(section, key)
    if setting is None:
        raise BadEntry(keys, f"unknown setting {as_written(key)}{_nearest(key, _known_keys(section))}")
    if key == "fp16" and value in (None, False):
        return
    value = _old_value(setting.name, value)
    if value in _NOT_GIVEN:
        return
    try:
        unspecified = setting.name == "num_processes" and value == UNSET_PROCESSES
        parsed = UNSET_PROCESSES if unspecified else read(setting, value)
    except BadValue as error:
        raise BadEntry(keys, f"{key}: {error}") from None
    entry = entries.setdefault(setting.name, Entry(parsed, keys))
    if entry.value != parsed:
        raise BadEntry(keys, f"{'.'.join(keys)} and {'.'.join(entry.keys)} are one setting: keep one")


def setting_of(section: str, key: Any) -> Setting | None:
    """Return the setting for a key of a section, also for old and short spellings; None if unknown."""
    section, key = _RENAMED.get((section, key), (section, key))
    if section == "" and key == "gradient_accumulation_steps":
        return BY_NAME[key]
    by_key = _SECTIONS.get(section, {})
    return by_key.get(key) or by_key.get(f"{_PREFIXES.get(section, '')}{key}")


def unread_keys(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return section and key of each entry that no version of Accelerate reads, except misspellings."""
    sections = [(section, content) for section, content in document.items() if isinstance(content, Mapping)]
    return [(section, str(key)) for section, content in sections for key in content if is_unread(section, key)]


def is_unread(section: str, key: Any) -> bool:
    """Return True for an unknown key that is neither a misspelling nor, as Accelerate reads it, of another section."""
    if section not in _TOLERANT or f"{_TOLERANT[section]}{key}" in BY_NAME or setting_of(section, key) is not None:
        return False
    import difflib

    # Without the common prefix, by which all keys of a section resemble each other.
    prefix = _PREFIXES[section]
    known = [name.removeprefix(prefix) for name in _SECTIONS[section]]
    return not difflib.get_close_matches(str(key).removeprefix(prefix), known, n=1, cutoff=_NEAR_MISS)


def _old_value(name: str, value: Any) -> Any:
    try:
        return _OLD_VALUES.get(name, {}).get(value, value)
    except TypeError:  # a list or a mapping
        return value


def _known_keys(section: str) -> Iterable[str]:
    if section:
        return _SECTIONS.get(section, {})
    return [*_SECTIONS[""], *_PREFIXES]


def _nearest(key: Any, known: Iterable[str]) -> str:
    from accel.errors import nearest

    return nearest(str(key), known)


def _plain(setting: Setting, value: Any) -> Any:
    """Return the value in the type and case that Accelerate writes."""
    if isinstance(value, tuple):
        return list(value)
    if setting.name in ("num_machines", "fsdp_version") and str(value).isdigit():
        return int(value)
    if setting.name == "fsdp_reshard_after_forward" and value in ("true", "false"):
        return value == "true"
    return value.upper() if setting.name in ("dynamo_backend", "fp8_backend") else value
