"""What holds when several have spoken: flags, the environment, the scheduler, the file, the defaults, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import BY_NAME, GROUPS
from .config_file import UNSAID_PROCESSES, Entry
from .contradictions import PAIRS, WAYS, is_given
from .env_variables import is_on
from .values import BadValue, read

_READ = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
_WAY_OF = {"MULTI_CPU": "cpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "XLA": "tpu",
           "MEGATRON_LM": "use_megatron_lm"}  # fmt: skip
_ORDER = ("default", "file", "scheduler", "environment", "flag")
# A scheduler that has placed this process knows these better than a file that was written before.
_OF_SCHEDULER = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


class Value(NamedTuple):
    """A setting's value, and where it comes from.

    layer:  flag, environment, scheduler, file or default.
    source: the same for people: the flag, the variable, `file:line`.
    """

    value: Any
    source: str = "default"
    layer: str = "default"


class Nodes(NamedTuple):
    """What the scheduler has said: how many nodes, which of them this is, where node 0 answers; and who said it."""

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
    """Every setting with its value and source.

    flags: what the command line gives, and nothing else.
    where: says on which line of which file an `Entry` of `file` stands.

    Raises BadValue for a variable, which the message names, that holds no value of its setting.
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
    """Takes back what contradicts something that a higher layer says."""
    options = {name: value.value for name, value in found.items()}
    pairs = [pair for pair in PAIRS if all(is_given(name, options) for name in pair)]
    if options["fp8_backend"] and options["mixed_precision"] != "fp8":
        pairs.append(("fp8_backend", "mixed_precision"))
    for pair in pairs:
        lower, higher = sorted(pair, key=lambda name: _ORDER.index(found[name].layer))
        if found[lower].layer != found[higher].layer and found[higher].layer in ("flag", "environment"):
            found[lower] = Value(BY_NAME[lower].default)


def _refuse_bad(bad: Mapping[str, str], found: Mapping[str, Value]) -> None:
    """A variable that only looks like a setting of something that is off is somebody else's."""
    options = {name: value.value for name, value in found.items()}
    for group in GROUPS:
        for setting in group.settings:
            if setting.name in bad and found[setting.name].layer != "flag" and is_on(group, options):
                raise BadValue(f"environment variable {setting.env}: {bad[setting.name]}")


def overridden(found: Mapping[str, Value], env: Mapping[str, str]) -> dict[str, str]:
    """Variables that say a way of training which a flag has overruled: a worker must not inherit them."""
    names = {BY_NAME[name].env: found[name].value for name in WAYS if BY_NAME[name].env}
    return {name: "false" for name, value in names.items() if name in env and value is False and _says_yes(env[name])}


def _says_yes(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes", "y", "t", "on")


def _ways(values: Mapping[str, Value]) -> bool:
    return any(values[name].value for name in WAYS if name in values)


def _from_environment(env: Mapping[str, str], *, decided: bool) -> tuple[dict[str, Value], dict[str, str]]:
    """What variables say, and by the setting's name why others say nothing that their setting could have."""
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
    """Sizes in a file ask for the parallelism that they are the sizes of."""
    sizes = [value for name, value in values.items() if name.startswith("parallelism_config_")]
    if sizes:
        values["use_parallelism_config"] = Value(True, sizes[0].source, "file")


def _on_nodes(values: dict[str, Value], nodes: Nodes | None) -> dict[str, Value]:
    """A file's number of processes is that of its own machines: each of the scheduler's nodes runs as many as those."""
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
