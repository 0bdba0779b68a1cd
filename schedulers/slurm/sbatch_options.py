"""The options of sbatch by their own names, so that a wrong one is rejected before sbatch is called.

From the manual pages of Slurm 20.11 to 25.05 (https://slurm.schedmd.com/sbatch.html). The number is the
version that introduced an option, if later than 20.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..errors import SpecError
from ..hints import hint

Value = Literal["value", "switch", "either"]

_VALUES = """
account acctg-freq batch bb bbf begin chdir cluster-constraint clusters comment constraint core-spec cores-per-socket
cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude export export-file
extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode
output partition power priority profile qos reservation signal sockets-per-node switches thread-spec threads-per-core
time time-min tmp uid wait-all-nodes wckey array
""".split()
_SWITCHES = """
contiguous hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot requeue spread-job test-only
use-min-nodes verbose wait
""".split()
_EITHER = "exclusive get-user-env nice no-kill propagate".split()
_LATER: Mapping[str, tuple[str, Value]] = {
    "container": ("21.08", "value"),
    "prefer": ("22.05", "value"),
    "container-id": ("23.02", "value"),
    "extra": ("23.02", "value"),
    "tres-bind": ("23.02", "value"),
    "tres-per-task": ("23.02", "value"),
    "oom-kill-step": ("24.05", "either"),
    "resv-ports": ("24.05", "either"),
    "segment": ("24.05", "value"),
    "stepmgr": ("24.05", "switch"),
    "consolidate-segments": ("25.05", "switch"),
    "spread-segments": ("25.05", "switch"),
}

# Options that accel sets itself -> the option of accel to use instead.
_OURS: Mapping[str, str] = {
    "array": "--sweep",
    "chdir": "--code",
    "comment": "--name (accel finds its jobs by their comments)",
    "dependency": "--after",
    "error": "accel logs",
    "export": "--env",
    "gres": "gres: in the target, or --gpus",
    "job-name": "--name",
    "kill-on-invalid-dep": "--after",
    "nodes": "--nodes",
    "no-requeue": "--max-restarts",
    "ntasks": "--procs-per-node",
    "ntasks-per-node": "--procs-per-node",
    "open-mode": "accel logs",
    "output": "accel logs",
    "parsable": "--json",
    "quiet": "--json",
    "requeue": "--max-restarts",
    "signal": "--grace",
    "test-only": "--dry-run",
    "time": "--time-limit",
    "verbose": "--json",
    "wait": "accel wait",
}

# Options that request GPUs, besides --gres.
GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
# Options that request the same resource; sbatch accepts one of them: https://slurm.schedmd.com/sbatch.html
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
CPUS = ("cpus-per-task", "cpus-per-gpu")

OPTIONS: Mapping[str, Value] = {
    **dict.fromkeys(_VALUES, "value"),
    **dict.fromkeys(_SWITCHES, "switch"),
    **dict.fromkeys(_EITHER, "either"),
    **{name: kind for name, (_, kind) in _LATER.items()},
}


def introduced_in(name: str) -> str:
    """Return the version of Slurm that introduced the option; 20.11 means that or an earlier one."""
    return _LATER[name][0] if name in _LATER else "20.11"


def check(options: Mapping[str, str | int | float | bool], subject: str) -> None:
    """Raise SpecError for an unknown option, one that accel sets itself, or a wrong value."""
    for key, value in options.items():
        name = key.replace("_", "-")
        kind = OPTIONS.get(name)
        if kind is None:
            raise SpecError(f"{subject}: sbatch has no option {key!r}{hint(name, OPTIONS, 'sbatch')}")
        if name in _OURS:
            raise SpecError(f"{subject}: accel sets {name!r} itself; use instead: {_OURS[name]}")
        if kind == "value" and isinstance(value, bool):
            raise SpecError(f"{subject}: {key} needs a value")
        if kind == "switch" and not isinstance(value, bool):
            raise SpecError(f"{subject}: {key} is true or false, not {value!r}")
    for resource, names in (("memory", MEMORY), ("processors", CPUS)):
        if len(keys := among(options, names)) > 1:
            raise SpecError(f"{subject}: {' and '.join(keys)} both request {resource}: keep one")


def among(options: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the keys, in their own spelling, of the options that are among `names`."""
    return [key for key in options if key.replace("_", "-") in names]


def unsupported_options(options: Mapping[str, object], version: str) -> list[str]:
    """Return a line for each option that this version of Slurm does not have yet."""
    return [
        f"sbatch --{name} needs Slurm {introduced_in(name)} or later, and slurm_version is {version}"
        for name in (key.replace("_", "-") for key in options)
        if name in _LATER and _number(introduced_in(name)) > _number(version)
    ]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
