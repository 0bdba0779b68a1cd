"""Settings of a configuration file, as the defaults of a job."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .argv import UsageError


class LaunchDefaults(NamedTuple):
    """A configuration file's settings for a job.

    nodes:                minimum, and maximum if it differs.
    procs_per_node, gpus: per node.
    notes:                settings that the job ignores, a line each.
    kind:                 the only kind of target for the file (SageMaker, TPU); `options` are that target's.
    """

    env: dict[str, str]
    nodes: tuple[int, int | None] | None = None
    procs_per_node: int | None = None
    gpus: int | None = None
    notes: tuple[str, ...] = ()
    kind: str | None = None
    name: str | None = None
    time_limit_s: float | None = None
    options: Mapping[str, Any] = MappingProxyType({})


def launch_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the workers' variables in the form that `accel launch` reads."""
    from accel.settings import BY_NAME
    from accel.settings.env_variables import variables
    from accel.settings.setting import typed

    env = variables(options)
    env.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # the launcher sets it again
    if options["cpu"]:
        env["ACCELERATE_USE_CPU"] = "true"
    if options["mixed_precision"] == "fp8":
        setting = BY_NAME["fp8_override_linear_precision"]  # three variables for a worker, one for the launcher
        env[setting.env] = typed(setting, options[setting.name])
    return env


def layout(path: str, options: Mapping[str, Any], command: str) -> tuple[int, int, int | None]:
    from accel.launch.errors import LaunchConfigError
    from accel.launch.machines import check_spread, machine_range

    total = options["num_processes"] or None
    try:
        low, high = machine_range(str(options["num_machines"] or 1))
        check_spread(total, low)
    except LaunchConfigError as error:
        raise UsageError(command, f"{path}: {error}") from None
    return low, high, None if total is None else int(total) // low
