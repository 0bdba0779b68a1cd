"""A configuration file of `accel launch` as settings of a job: nodes, processes, GPUs, and variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .argv import UsageError
from .carried import Carried, launch_variables, machines, processes

if TYPE_CHECKING:
    from accel.settings.precedence import Value

_COMMAND = "accel submit"
# What only starts on the machine where the command is typed, and the way to do that.
_ELSEWHERE = {"mpirun_hostfile": "mpirun", "deepspeed_hostfile": "DeepSpeed's own launcher"}
# What a job has from its target, whatever a file says.
_OF_TARGET = ("gpu_ids", "rdzv_backend", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
# What only `accel launch` does with a pod.
_OF_POD = ("tpu_use_sudo", "vm")


def of_file(path: str, script: str = "") -> Carried:
    """Return the settings of a file; `script` is the program.

    Raises UsageError for an invalid file, and for one that a job cannot use.
    """
    from accel.settings.contradictions import contradictions
    from accel.settings.precedence import resolve

    from .launch_file import read_file

    file = read_file(_COMMAND, path)
    found = resolve({}, {}, file.entries, file.where)
    options = {name: value.value for name, value in found.items()}
    wrong = contradictions(options, {name: value.source for name, value in found.items() if value.layer == "file"})
    if wrong:
        raise UsageError(_COMMAND, wrong)
    if options["compute_environment"] != "LOCAL_MACHINE":
        from .sagemaker_file import carry

        return carry(_COMMAND, found, script)
    for name, what in _ELSEWHERE.items():
        if options[name]:
            raise UsageError(_COMMAND, f"{path} is for {what}: accel launch --config_file {path} SCRIPT starts it")
    low, high = machines(path, options, _COMMAND)
    per_node = processes(path, options, low, _COMMAND)
    return Carried(
        env=launch_variables(options) | _pod_variables(options),
        nodes=(low, high if high != low else None) if found["num_machines"].layer == "file" else None,
        procs_per_node=per_node,
        gpus=per_node if options["multi_gpu"] else None,
        notes=tuple(_left_out(found)),
        kind="tpu" if options["tpu"] else None,
        options=_of_slice(options) if options["tpu"] else {},
    )


def _of_slice(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TPU file's settings as options of a tpu target."""
    names = {"name": "tpu_name", "zone": "tpu_zone", "main_training_function": "main_training_function"}
    return {key: options[name] for key, name in names.items() if options[name]}


def _pod_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a TPU's file sets on the hosts of its pod."""
    return dict(pair.split("=", 1) for pair in options["env"] or ())


def _left_out(found: Mapping[str, Value]) -> Iterator[str]:
    from accel.settings import BY_NAME
    from accel.settings.contradictions import is_given

    options = {name: value.value for name, value in found.items()}
    for name in _OF_TARGET:
        if is_given(name, options) and options[name] != BY_NAME[name].default:
            said = f"{found[name].source}: {BY_NAME[name].file_key} {options[name]}"
            yield f"{said} is left out: which machines and GPUs a job has is for its target to say"
    for name in _OF_POD:
        if is_given(name, options) and options[name] != BY_NAME[name].default:
            yield f"{found[name].source}: {BY_NAME[name].file_key} is left out: only accel launch has a use for it"
    if options["multi_gpu"] and not options["num_processes"]:
        yield f"{found['multi_gpu'].source}: num_processes is not said: the job asks for as many GPUs as --gpus says"
