"""What a job's environment must not inherit from the place it was submitted from."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "PET_", "TORCHELASTIC_")
_NAMES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "NODE_RANK MASTER_ADDR MASTER_PORT ACCEL_NODE_RANK ACCEL_NODES ACCEL_MASTER ACCEL_ATTEMPT ACCEL_LAUNCH_ID "
    "ACCEL_JOB_ID ACCEL_JOB_DIR ACCEL_JOB_LOCK ACCEL_PORT ACCEL_NODE_NAMES ACCEL_FENCE ACCEL_LAUNCH_EVENTS "
    "ACCEL_REQUEUED ACCEL_SECRETS JOB_COMPLETION_INDEX JOBSET_RESTART_ATTEMPT".split()
)
_KEPT = "SLURM_CONF"  # where the client finds its controller: SLURM_CONF, SLURM_CONF_SERVER
# What people and sites set for all their jobs.
_DEFAULTS = ("account", "constraint", "partition", "qos", "reservation", "wckey")


def outside_any_job(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables that tell a process which rank of which job it is.

    A job that is submitted from inside another one would otherwise take itself for a part of it. What a launcher has
    told its ranks about training (`ACCELERATE_*`) goes too; set by a person, outside any launch, it stays.
    """
    prefixes = (*_PREFIXES, "ACCELERATE_") if "ACCEL_LAUNCH_ID" in env else _PREFIXES
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_KEPT) or not (name in _NAMES or name.startswith(prefixes))
    }


def for_sbatch(env: Mapping[str, str], script: str) -> dict[str, str]:
    """`env` for an sbatch of this batch script: of its own variables those that say who pays, and where, count.

    Not those that the script gives itself, because sbatch would take the variable's, and none inside a job, where they
    are the job's.
    """
    outside = outside_any_job(env)
    if "SLURM_JOB_ID" in env:
        return outside
    given = {f"SBATCH_{name.upper()}" for name in _DEFAULTS if f"\n#SBATCH --{name}=" not in script}
    return {**outside, **{name: value for name, value in env.items() if name in given}}
