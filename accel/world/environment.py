"""Environment variables, the only contract between a launcher and the runtime, parsed and checked.

Does not import torch. Functions named ``read_…`` are pure: they take the mapping that they read. Those from
`patch_environment` on use this process's environment; most exist for scripts written for Accelerate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from accel.errors import ArgumentError, WorldError

_TRUE = frozenset({"1", "true", "yes", "y", "on", "t"})
_FALSE = frozenset({"", "0", "false", "no", "n", "off", "f"})

# Each launcher's variables for rank, world size, local rank and local world size.
# torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html; Intel MPI and MPICH (Hydra):
# https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux (other environment variables);
# Open MPI: https://docs.open-mpi.org (environment variables of an application); MVAPICH2: its user guide.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH2": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# Variables of tasks that no launcher has given ranks, and their least value for one of several.
# Slurm: https://slurm.schedmd.com/srun.html (SLURM_NTASKS is the job's in a batch step of one task); Flux:
# https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html; jsrun (JSM):
# https://www.ibm.com/support/knowledgecenter/SSWRJV_10.1.0/jsm/jsm_kickoff.html; PMIx, and Open MPI's mpirun:
# https://docs.openpmix.org; PALS: mpiexec(1) of HPE Cray.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": 2,
    "FLUX_JOB_SIZE": 2,
    "JSM_NAMESPACE_SIZE": 2,
    "PALS_LOCAL_SIZE": 2,
    "PALS_RANKID": 1,
    "PMIX_RANK": 1,
}
_PORT = 29500

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a process, the world's sizes and its rendezvous address."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None


def read_flag(env: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Read a boolean. Raises `ArgumentError` for a value that is neither yes nor no."""
    text = env.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ArgumentError(f"environment variable {name}={text!r} is neither yes nor no: use 1 or 0")


def read_int(env: Mapping[str, str], name: str, *, minimum: int) -> int | None:
    """Read a whole number of at least ``minimum``; ``None`` when the variable is not set."""
    text = env.get(name)
    if text is None or not text.strip():
        return None
    try:
        value = int(text)
    except ValueError:
        raise WorldError(f"environment variable {name}={text!r} is not a whole number") from None
    if value < minimum:
        raise WorldError(f"environment variable {name}={value} is less than {minimum}")
    return value


def read_world(env: Mapping[str, str], *, needs_master: bool = True) -> World:
    """Read this process's ranks from torchrun's variables or, if they are not set, from an MPI launcher's.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are read only if ``needs_master``; under MPI the default port is 29500,
    and the default address this machine if every rank is on it. Without a world size, or with one of 1, the world
    is this process alone. Incomplete or contradictory variables raise `WorldError`: N processes must never become
    N worlds of one.
    """
    if "WORLD_SIZE" not in env and "RANK" not in env:
        for launcher, names in LAUNCHERS.items():
            if launcher != "torchrun" and (env.get(names[0]) or env.get(names[1])):
                return _read_mpi(env, launcher, names, needs_master)
        task = one_of_several(env)
        if task is not None:
            raise WorldError(
                f"{task}: this process is one of several tasks, and no launcher has given it a rank: start "
                "`accel launch` once on each node (srun --ntasks-per-node=1 accel launch …), or export WORLD_SIZE=1 "
                "for tasks that are meant to be alone"
            )
    size = read_int(env, "WORLD_SIZE", minimum=1)
    rank = read_int(env, "RANK", minimum=0)
    if size is None and rank is not None and rank > 0:
        raise WorldError(f"RANK={rank} is set but WORLD_SIZE is not: set both, or start with `accel launch`")
    size = size or 1
    if size == 1:
        return _single_process(env, rank)
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if needs_master else ("RANK",)
    missing = [name for name in needed if not env.get(name, "").strip()]
    if missing:
        raise WorldError(f"WORLD_SIZE={size} but {', '.join(missing)} not set: start with `accel launch` or torchrun")
    return _launched_process(env, size, LAUNCHERS["torchrun"])


def one_of_several(env: Mapping[str, str]) -> str | None:
    """Return the variable, with its value, by which this process is one of several tasks; None if there is none."""
    return next((f"{name}={env[name]}" for name, least in _TASKS.items() if _number(env.get(name)) >= least), None)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def torchrun_variables(world: World) -> dict[str, str]:
    """Return ``world`` as torchrun's variables, for readers of only those: torch's ``env://``, other libraries."""
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": world.master_port,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _read_mpi(env: Mapping[str, str], launcher: str, names: tuple[str, str, str, str], needs_master: bool) -> World:
    size = read_int(env, names[1], minimum=1)
    if size is None or not env.get(names[0]):
        absent, present = (names[1], names[0]) if size is None else (names[0], names[1])
        raise WorldError(f"{present}={env.get(present)} is set but {absent} is not: {launcher} gives both")
    if size == 1:
        return World(local_rank=read_int(env, names[2], minimum=0) or 0)
    world = _launched_process({"MASTER_PORT": str(_PORT), **env}, size, names)
    if world.master_addr or not needs_master:
        return world
    if read_int(env, names[3], minimum=1) != size:
        raise WorldError(
            f"{names[1]}={size} but MASTER_ADDR is not set and {names[3]} does not say that all are on this machine: "
            "export the address of rank 0 as MASTER_ADDR"
        )
    return replace(world, master_addr="127.0.0.1")


def _single_process(env: Mapping[str, str], rank: int | None) -> World:
    if rank:
        raise WorldError(f"RANK={rank} is not below WORLD_SIZE=1")
    return World(local_rank=read_int(env, "LOCAL_RANK", minimum=-1) or 0)


def _launched_process(env: Mapping[str, str], size: int, names: tuple[str, str, str, str]) -> World:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank = read_int(env, rank_name, minimum=0)
    assert rank is not None
    if rank >= size:
        raise WorldError(f"{rank_name}={rank} is not below {size_name}={size}")
    local_rank = read_int(env, local_rank_name, minimum=0)
    local_size = read_int(env, local_size_name, minimum=1)
    if local_rank is None:
        if local_size is not None and local_size != size:
            raise WorldError(f"{local_size_name}={local_size} of {size_name}={size} but {local_rank_name} not set")
        local_rank = rank
    if local_size is not None and local_rank >= local_size:
        raise WorldError(f"{local_rank_name}={local_rank} is not below {local_size_name}={local_size}")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size or size,
        master_addr=env.get("MASTER_ADDR"),
        master_port=read_int(env, "MASTER_PORT", minimum=0),
    )


@contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set each keyword, in upper case, as a variable in the block; restore all of them afterwards."""
    names = [name.upper() for name in kwargs]
    previous = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in zip(names, kwargs.values(), strict=True)})
    try:
        yield
    finally:
        _restore(previous)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Unset all variables in the block; restore them afterwards, regardless of what the block did."""
    previous = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


def purge_accelerate_environment(func_or_cls: Wrapped) -> Wrapped:
    """Decorate a function, or each test method of a class and its subclasses, to restore ``ACCELERATE_…``.

    Variables that the function sets are unset again, and those that it changes or removes are restored, also when
    it raises.
    """
    if isinstance(func_or_cls, type):
        return cast(Wrapped, _purge_tests(func_or_cls))

    @wraps(func_or_cls)
    def run(*args: Any, **kwargs: Any) -> Any:
        previous = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        try:
            return func_or_cls(*args, **kwargs)
        finally:
            added = {name: None for name in os.environ if name.startswith("ACCELERATE_")}
            _restore({**added, **previous})

    run._purges_environment = True  # type: ignore[attr-defined]
    return cast(Wrapped, run)


def _purge_tests(cls: type) -> type:
    for name in dir(cls):
        method = getattr(cls, name)
        if name.startswith("test") and callable(method) and not hasattr(method, "_purges_environment"):
            setattr(cls, name, purge_accelerate_environment(method))

    def purge_subclass(subclass: type, /, **kwargs: Any) -> None:
        super(cls, subclass).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        _purge_tests(subclass)

    purge: Any = purge_subclass
    setattr(cls, "__init_subclass__", classmethod(purge))  # noqa: B010  # the type checker refuses `cls.… =`
    return cls


def _restore(previous: Mapping[str, str | None]) -> None:
    for name, value in previous.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for y, yes, t, true, on and 1, and 0 for their opposites; with ``to_bool`` True and False.

    Raises `ArgumentError` for any other text, including an empty one.
    """
    word = value.lower()
    if word not in _TRUE and (word not in _FALSE or not word):
        raise ArgumentError(f"{value!r} is neither yes nor no: use 1 or 0")
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of these variables that is set and not negative, else ``default``. Raises `ArgumentError`."""
    for key in env_keys:
        try:
            value = int(os.environ.get(key) or -1)
        except ValueError:
            raise ArgumentError(f"environment variable {key}={os.environ[key]!r} is not a whole number") from None
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Call `read_flag` for this process's environment."""
    return read_flag(os.environ, key, bool(default))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable's text, or ``default`` as text."""
    return os.environ.get(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return ``NAME=value`` lines, each with its newline, for a file that a shell reads.

    A pair that is empty on one side, or contains one of ``; < >``, a space or a newline, is skipped with a
    warning.
    """
    import logging

    lines = []
    for name, value in current_env.items():
        if name and value and not set(";\n<> ") & set(name + value):
            lines.append(f"{name}={value}\n")
        else:
            logging.getLogger(__name__).warning("%s=%r is skipped: it is empty or a shell would split it", name, value)
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of ``library_names`` that this process has imported."""
    return [name for name in library_names if name in sys.modules]


# ``ACCEL_PROJECT_ROOT``: a directory on each node for the files of a run. A platform such as SageMaker (with
# ``/opt/ml/checkpoints``) uploads all nodes' files to one place and restores all of them on every node. So files of two
# nodes must not have the same name.

PROJECT_ROOT = "ACCEL_PROJECT_ROOT"


def project_root() -> Path | None:
    """Return the directory in ``ACCEL_PROJECT_ROOT``, if set. Raises `ArgumentError` for a relative one."""
    name = os.environ.get(PROJECT_ROOT)
    if not name:
        return None
    if not os.path.isabs(name):
        raise ArgumentError(f"environment variable {PROJECT_ROOT}={name!r} must be an absolute path")
    return Path(name).resolve()


def under_project_root(directory: str | None) -> str | None:
    """Return ``directory``; a relative one is placed under ``ACCEL_PROJECT_ROOT``, if that is set."""
    base = project_root() if directory is not None else None
    return directory if base is None or directory is None else str(base / directory)


def own_copy(path: Path) -> Path:
    """Return the path of this node's copy of ``path``.

    Under ``ACCEL_PROJECT_ROOT`` it is ``path`` itself on node 0, and in the subdirectory ``node-N`` on node N.
    """
    base = project_root()
    rank = read_int(os.environ, "GROUP_RANK", minimum=0)
    if base is None or not rank or not path.is_relative_to(base):
        return path
    return base / f"node-{rank}" / path.relative_to(base)
