"""What a configuration file of `accel launch` says to a job: variables, which the launch on its nodes reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .words import UsageError

_COMMAND = "accel submit"
# What only starts on the machine where the command is typed, and the way to do that.
_ELSEWHERE = {"tpu": "a TPU", "mpirun_hostfile": "mpirun", "deepspeed_hostfile": "DeepSpeed's own launcher"}


class Carried(NamedTuple):
    """What a file says to a job: variables, and the processes of each of its nodes, where it says how many."""

    env: dict[str, str]
    procs_per_node: int | None


def of_file(path: str) -> Carried:
    """Raises UsageError for a file that is wrong, and for one of which a job can make nothing."""
    from accel.settings.checks import contradictions
    from accel.settings.layers import resolve

    from .launch_file import read_file

    file = read_file(_COMMAND, path)
    found = resolve({}, {}, file.entries, file.where)
    options = {name: value.value for name, value in found.items()}
    wrong = contradictions(options, {name: value.source for name, value in found.items() if value.layer == "file"})
    if wrong:
        raise UsageError(_COMMAND, wrong)
    if options["compute_environment"] != "LOCAL_MACHINE":
        raise UsageError(_COMMAND, f"{path} is for SageMaker: accel launch --config_file {path} SCRIPT starts it there")
    for name, what in _ELSEWHERE.items():
        if options[name]:
            raise UsageError(_COMMAND, f"{path} is for {what}: accel launch --config_file {path} SCRIPT starts it")
    return Carried(_variables(options), _processes(path, options))


def _variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Those of a worker, in the form in which a launch reads them."""
    from accel.settings import BY_NAME
    from accel.settings.values import typed
    from accel.settings.worker import variables

    env = variables(options)
    env.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # the launch says it anew
    if options["cpu"]:
        env["ACCELERATE_USE_CPU"] = "true"
    if options["mixed_precision"] == "fp8":
        setting = BY_NAME["fp8_override_linear_precision"]  # three variables of a worker, one of the launch
        env[setting.env] = typed(setting, options[setting.name])
    return env


def _processes(path: str, options: Mapping[str, Any]) -> int | None:
    total, machines = options["num_processes"], str(options["num_machines"] or 1)
    if not total:
        return None
    if not machines.isdigit() or int(machines) < 1 or total % int(machines):
        raise UsageError(_COMMAND, f"{path}: num_processes {total} is not so many on each of {machines} machines")
    return int(total) // int(machines)
