"""Precedence of settings: flags, then the environment, the scheduler, the file, and the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME, GROUPS
from .config_file import UNSET_PROCESSES, Entry
from .contradictions import BACKEND_SWITCHES, PAIRS, is_given
from .env_variables import is_on
from .setting import BadValue, read

_READ = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
_SWITCH_OF_TYPE = {"MULTI_CPU": "cpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "XLA": "tpu",
           "MEGATRON_LM": "use_megatron_lm"}  # fmt: skip
_ORDER = ("default", "file", "scheduler", "environment", "flag")
# A scheduler that has placed this process overrides these settings of a file.
_OF_SCHEDULER = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


class Value(NamedTuple):
    """A setting's value and its source.

    layer:  flag, environment, scheduler, file or default.
    source: for messages: the flag, the variable, `file:line`.
    """

    value: Any
    source: str = "default"
    layer: str = "default"


class Nodes(NamedTuple):
    """The scheduler's view: number of nodes, this node's rank, node 0's address and port, and its name."""

    nodes: int
    rank: int
    address: str
    port: int | None
    source: str


def resolve(
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    file: Mapping[str, Entry],
    locate: Callable[[tuple[str, ...]], str],
    nodes: Nodes | None = None,
) -> dict[str, Value]:
    """Return every setting with its value and source.

    flags:  the values on the command line.
    locate: returns file and line of an `Entry` of `file`.

    Raises BadValue for an environment variable with an invalid value; the message names the variable.
    """
    settings = {setting.name: Value(setting.default) for group in GROUPS for setting in group.settings}
    overrides = {name: Value(value, BY_NAME[name].display_name, "flag") for name, value in flags.items()}
    env_settings, errors = _from_environment(env, has_switch=_has_backend_switch(overrides))
    overrides = env_settings | overrides
    settings |= _from_file(file, locate, has_switch=_has_backend_switch(overrides), nodes=nodes)
    if nodes is not None:
        scheduler_values = (str(nodes.nodes), nodes.rank, nodes.address, nodes.port)
        for name, value in zip(_OF_SCHEDULER, scheduler_values, strict=True):
            if value is not None and "num_machines" not in overrides:
                settings[name] = Value(value, nodes.source, "scheduler")
    settings |= overrides
    _drop_overruled(settings)
    _reject_invalid(errors, settings)
    return settings


def _drop_overruled(settings: dict[str, Value]) -> None:
    """Reset settings that contradict a setting of a higher layer."""
    options = {name: value.value for name, value in settings.items()}
    pairs = [pair for pair in PAIRS if all(is_given(name, options) for name in pair)]
    if options["fp8_backend"] and options["mixed_precision"] != "fp8":
        pairs.append(("fp8_backend", "mixed_precision"))
    for pair in pairs:
        lower, higher = sorted(pair, key=lambda name: _ORDER.index(settings[name].layer))
        if settings[lower].layer != settings[higher].layer and settings[higher].layer in ("flag", "environment"):
            settings[lower] = Value(BY_NAME[lower].default)


def _reject_invalid(errors: Mapping[str, str], settings: Mapping[str, Value]) -> None:
    """Raise BadValue for an invalid variable, unless its group is off: then it belongs to another program."""
    options = {name: value.value for name, value in settings.items()}
    for group in GROUPS:
        for setting in group.settings:
            if setting.name in errors and settings[setting.name].layer != "flag" and is_on(group, options):
                raise BadValue(f"environment variable {setting.env}: {errors[setting.name]}")


def overridden(settings: Mapping[str, Value], env: Mapping[str, str]) -> dict[str, str]:
    """Return variables of training strategies that a flag overrules, set to false: workers must not inherit them."""
    names = {BY_NAME[name].env: settings[name].value for name in BACKEND_SWITCHES if BY_NAME[name].env}
    return {name: "false" for name, value in names.items() if name in env and value is False and _is_true(env[name])}


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "y", "t", "on")


def _has_backend_switch(values: Mapping[str, Value]) -> bool:
    return any(values[name].value for name in BACKEND_SWITCHES if name in values)


def _from_environment(env: Mapping[str, str], *, has_switch: bool) -> tuple[dict[str, Value], dict[str, str]]:
    """Return the settings in the environment, and the errors of invalid variables by setting."""
    values: dict[str, Value] = {}
    errors: dict[str, str] = {}
    for setting in BY_NAME.values():
        if (
            setting.env.startswith(_READ)
            and env.get(setting.env)
            and not (has_switch and setting.name in BACKEND_SWITCHES)
        ):
            try:
                value = read(setting, env[setting.env])
            except BadValue as error:
                errors[setting.name] = str(error)
            else:
                values[setting.name] = Value(value, f"environment variable {setting.env}", "environment")
    return values, errors


def _from_file(
    file: Mapping[str, Entry], locate: Callable[[tuple[str, ...]], str], *, has_switch: bool, nodes: Nodes | None
) -> dict[str, Value]:
    values = {name: Value(entry.value, locate(entry.keys), "file") for name, entry in file.items()}
    kind = values.get("distributed_type", Value("NO"))
    if has_switch or kind.value in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        values.pop("cpu", None)
    switch = _SWITCH_OF_TYPE.get(kind.value, "multi_gpu" if str(kind.value).startswith("MULTI_") else "")
    if switch and not has_switch:
        values[switch] = Value(True, kind.source, "file")
    if not has_switch:
        _turn_on(values)
    if kind.value == "NO" and not has_switch and _is_single(values):
        values.setdefault("num_processes", Value(1, kind.source, "file"))  # as Accelerate reads such a file
    if values.get("num_processes", Value(None)).value == UNSET_PROCESSES:
        del values["num_processes"]
    machines, processes = values.get("num_machines", Value("1")).value, values.get("num_processes", Value(None))
    if kind.value == "XLA" and processes.value and machines.isdigit():  # Accelerate starts this number on each host
        values["num_processes"] = processes._replace(value=processes.value * int(machines))
    return _on_nodes(values, nodes)


def _is_single(values: Mapping[str, Value]) -> bool:
    """Return True for a file for this machine alone, which says that it distributes nothing."""
    elsewhere = values.get("compute_environment", Value("")).value == "AMAZON_SAGEMAKER"
    return "distributed_type" in values and values.get("num_machines", Value("1")).value == "1" and not elsewhere


def _turn_on(values: dict[str, Value]) -> None:
    """Enable the parallelism for which a file gives sizes."""
    sizes = [value for name, value in values.items() if name.startswith("parallelism_config_")]
    if sizes:
        values["use_parallelism_config"] = Value(True, sizes[0].source, "file")


def _on_nodes(values: dict[str, Value], nodes: Nodes | None) -> dict[str, Value]:
    """Scale a file's number of processes from its own machines to the scheduler's nodes."""
    if nodes is None:
        return values
    num_machines = values.get("num_machines", Value("1")).value
    total = values.get("num_processes")
    if total is not None and total.value and num_machines.isdigit() and int(num_machines) not in (0, nodes.nodes):
        per_node, remainder = divmod(total.value, int(num_machines))
        if not remainder:
            source = f"{total.source}, {per_node} on each of {nodes.nodes} nodes"
            values["num_processes"] = Value(per_node * nodes.nodes, source, "file")
    return {name: value for name, value in values.items() if name not in _OF_SCHEDULER}
