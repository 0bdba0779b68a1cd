"""Environment variables and modules that a job must not take from its submitting process or its own directory."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "PET_", "TORCHELASTIC_")
_NAMES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
    "NODE_RANK MASTER_ADDR MASTER_PORT ACCEL_NODE_RANK ACCEL_NODES ACCEL_MASTER ACCEL_ATTEMPT ACCEL_LAUNCH_ID "
    "ACCEL_JOB_ID ACCEL_JOB_DIR ACCEL_JOB_LOCK ACCEL_JOB_SLOTS ACCEL_PORT ACCEL_NODE_NAMES ACCEL_FENCE "
    "ACCEL_LAUNCH_EVENTS ACCEL_REQUEUED ACCEL_SECRETS JOB_COMPLETION_INDEX JOBSET_RESTART_ATTEMPT".split()
)
_CONFIGURATION = "SLURM_CONF"  # where the client finds its controller: SLURM_CONF, SLURM_CONF_SERVER
# Defaults that users and sites set for all their jobs.
_DEFAULTS = ("account", "constraint", "partition", "qos", "reservation", "wckey")


def outside_any_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that set a process's rank in a job.

    With them, a job submitted from inside another one would take itself for a part of it. Under a launcher
    (`ACCEL_LAUNCH_ID` is set), `ACCELERATE_*` is removed too; without one, the user has set it, and it stays.
    """
    prefixes = (*_PREFIXES, "ACCELERATE_") if "ACCEL_LAUNCH_ID" in env else _PREFIXES
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_CONFIGURATION) or not (name in _NAMES or name.startswith(prefixes))
    }


def for_sbatch(env: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment for an sbatch of this batch script.

    Of the `SBATCH_*` variables only account, partition and the like stay, if the script does not set them: sbatch
    would prefer the variable. Inside a job none stays, because they are that job's.
    """
    outside = outside_any_job(env)
    if "SLURM_JOB_ID" in env:
        return outside
    allowed = {f"SBATCH_{name.upper()}" for name in _DEFAULTS if f"\n#SBATCH --{name}=" not in script}
    return {**outside, **{name: value for name, value in env.items() if name in allowed}}


def installed_main(module: str) -> str:
    """Return Python that runs `main` of an installed module, even if the working directory has one of that name."""
    return f"import sys; sys.path[:] = [p for p in sys.path if p]; from {module} import main; sys.exit(main())"
