"""Precedence of settings: flags, then the environment, the scheduler, the file, and the defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME, GROUPS
from .config_file import UNSAID_PROCESSES, Entry
from .contradictions import PAIRS, WAYS, is_given
from .env_variables import is_on
from .setting import BadValue, read

_READ = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
_WAY_OF = {"MULTI_CPU": "cpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "XLA": "tpu",
           "MEGATRON_LM": "use_megatron_lm"}  # fmt: skip
_ORDER = ("default", "file", "scheduler", "environment", "flag")
# A scheduler that has placed this process knows these better than a file that was written before.
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
    where: Callable[[tuple[str, ...]], str],
    nodes: Nodes | None = None,
) -> dict[str, Value]:
    """Return every setting with its value and source.

    flags: only what the command line gives.
    where: returns file and line of an `Entry` of `file`.

    Raises BadValue for an environment variable with an invalid value; the message names the variable.
    """
    found = {setting.name: Value(setting.default) for group in GROUPS for setting in group.settings}
    above = {name: Value(value, BY_NAME[name].shown, "flag") for name, value in flags.items()}
    said, bad = _from_environment(env, decided=_ways(above))
    above = said | above
    found |= _from_file(file, where, decided=_ways(above), nodes=nodes)
    if nodes is not None:
        placed = (str(nodes.nodes), nodes.rank, nodes.address, nodes.port)
        for name, value in zip(_OF_SCHEDULER, placed, strict=True):
            if value is not None and "num_machines" not in above:
                found[name] = Value(value, nodes.source, "scheduler")
    found |= above
    _drop_overruled(found)
    _refuse_bad(bad, found)
    return found


def _drop_overruled(found: dict[str, Value]) -> None:
    """Reset settings that contradict a setting of a higher layer."""
    options = {name: value.value for name, value in found.items()}
    pairs = [pair for pair in PAIRS if all(is_given(name, options) for name in pair)]
    if options["fp8_backend"] and options["mixed_precision"] != "fp8":
        pairs.append(("fp8_backend", "mixed_precision"))
    for pair in pairs:
        lower, higher = sorted(pair, key=lambda name: _ORDER.index(found[name].layer))
        if found[lower].layer != found[higher].layer and found[higher].layer in ("flag", "environment"):
            found[lower] = Value(BY_NAME[lower].default)


def _refuse_bad(bad: Mapping[str, str], found: Mapping[str, Value]) -> None:
    """Raise BadValue for an invalid variable, unless its group is off: then it belongs to another program."""
    options = {name: value.value for name, value in found.items()}
    for group in GROUPS:
        for setting in group.settings:
            if setting.name in bad and found[setting.name].layer != "flag" and is_on(group, options):
                raise BadValue(f"environment variable {setting.env}: {bad[setting.name]}")


def overridden(found: Mapping[str, Value], env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for ways of training that a flag has overruled, set to false: workers must not inherit them."""
    names = {BY_NAME[name].env: found[name].value for name in WAYS if BY_NAME[name].env}
    return {name: "false" for name, value in names.items() if name in env and value is False and _says_yes(env[name])}


def _says_yes(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "y", "t", "on")


def _ways(values: Mapping[str, Value]) -> bool:
    return any(values[name].value for name in WAYS if name in values)


def _from_environment(env: Mapping[str, str], *, decided: bool) -> tuple[dict[str, Value], dict[str, str]]:
    """Return the settings in the environment, and the errors of invalid variables by setting."""
    values: dict[str, Value] = {}
    bad: dict[str, str] = {}
    for setting in BY_NAME.values():
        if setting.env.startswith(_READ) and env.get(setting.env) and not (decided and setting.name in WAYS):
            try:
                value = read(setting, env[setting.env])
            except BadValue as error:
                bad[setting.name] = str(error)
            else:
                values[setting.name] = Value(value, f"environment variable {setting.env}", "environment")
    return values, bad


def _from_file(
    file: Mapping[str, Entry], where: Callable[[tuple[str, ...]], str], *, decided: bool, nodes: Nodes | None
) -> dict[str, Value]:
    values = {name: Value(entry.value, where(entry.keys), "file") for name, entry in file.items()}
    kind = values.get("distributed_type", Value("NO"))
    if decided or kind.value in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        values.pop("cpu", None)
    way = _WAY_OF.get(kind.value, "multi_gpu" if str(kind.value).startswith("MULTI_") else "")
    if way and not decided:
        values[way] = Value(True, kind.source, "file")
    if not decided:
        _turn_on(values)
    if values.get("num_processes", Value(None)).value == UNSAID_PROCESSES:
        del values["num_processes"]
    return _on_nodes(values, nodes)


def _turn_on(values: dict[str, Value]) -> None:
    """Enable the parallelism for which a file gives sizes."""
    sizes = [value for name, value in values.items() if name.startswith("parallelism_config_")]
    if sizes:
        values["use_parallelism_config"] = Value(True, sizes[0].source, "file")


def _on_nodes(values: dict[str, Value], nodes: Nodes | None) -> dict[str, Value]:
    """Scale a file's number of processes from its own machines to the scheduler's nodes."""
    if nodes is None:
        return values
    written = values.get("num_machines", Value("1")).value
    total = values.get("num_processes")
    if total is not None and total.value and written.isdigit() and int(written) not in (0, nodes.nodes):
        each, rest = divmod(total.value, int(written))
        if not rest:
            source = f"{total.source}, {each} on each of {nodes.nodes} nodes"
            values["num_processes"] = Value(each * nodes.nodes, source, "file")
    return {name: value for name, value in values.items() if name not in _OF_SCHEDULER}
