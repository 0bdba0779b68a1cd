"""Options of a Slurm target and their validation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import SpecError
from ..hosts.jobs.options import check_lines
from ..hosts.remote_files import ROOT
from . import sbatch_options as sbatch

Runtime = Literal["pyxis", "apptainer", "singularity"]

_VERSION = re.compile(r"\d\d\.\d\d(\.\d+)?\Z")
_GRES = re.compile(r"[^,\s]+(,[^,\s]+)*\Z")
_LAST_PORT = 65535

# Key of the target -> option of sbatch.
DIRECTIVES: Mapping[str, str] = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "reservation": "reservation",
    "mail_type": "mail-type",
    "mail_user": "mail-user",
    "exclusive": "exclusive",
}


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of a Slurm target in `accel.yaml`.

    login:           the login node, as `user@host:port` or a name in ~/.ssh/config; default: this machine.
    user, port:      of its SSH server, if `login` has none.
    ssh_config:      the configuration file for SSH, as for `ssh -F`, instead of ~/.ssh/config.
    root:            accel's directory on the cluster's shared file system, with `login`.
    python:          the nodes' interpreter with accel and torch (without `login`: this one).
    snapshot:        run a copy of the code as of the submit; with `login` always.
    cpu:             train on the CPU even if there are GPUs.
    partition, account, qos, constraint, nodelist, exclude, reservation, mail_type, mail_user, exclusive:
                     as in sbatch; several words as a list.
    gres:            generic resources, as in sbatch: `gpu:a100:4,nvme:1`.
    gpu_type:        the type of the job's GPUs, as in `gpu:TYPE:4` (--accelerator wins).
    array_throttle:  the number of jobs of one sweep that may run at a time.
    container:       the runtime of `--image`: pyxis (enroot), apptainer or singularity.
    container_mounts: further directories in the container, as `/host:/inside`.
    container_python: the interpreter in the container that has accel and torch.
    modules:         environment modules that the batch script loads.
    prologue:        lines of bash at the start of the batch script, on the first node.
    setup:           argvs run once on every node before the ranks start, before those of the job.
    interface:       the network interface between the nodes.
    start_timeout_s: the time that the nodes wait for each other.
    sbatch:          any other option of sbatch by its own name.
    srun:            further options for srun, which starts one launcher on each node.
    slurm_version:   of the cluster, such as 23.11; options that are newer cause a warning.
    """

    login: str | None = None
    user: str | None = None
    port: int | None = None
    ssh_config: str | None = None
    root: str = ROOT
    python: str | None = None
    snapshot: bool = False
    cpu: bool = False
    partition: str | tuple[str, ...] | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | tuple[str, ...] | None = None
    exclude: str | tuple[str, ...] | None = None
    reservation: str | None = None
    mail_type: str | tuple[str, ...] | None = None
    mail_user: str | None = None
    exclusive: bool | str = False
    gres: str | None = None
    gpu_type: str | None = None
    array_throttle: int | None = None
    container: Runtime | None = None
    container_mounts: tuple[str, ...] = ()
    container_python: str = "python3"
    modules: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    interface: str | None = None
    start_timeout_s: float = 300.0
    sbatch: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    slurm_version: str | None = None

    @property
    def clusters(self) -> str | None:
        """The clusters that a job may run on, if set for sbatch."""
        value = self.sbatch.get("clusters")
        return None if value is None else str(value)


def check(options: SlurmOptions, name: str) -> None:
    """Raise SpecError, which names the key, if an option is invalid."""
    subject = f"target {name}"
    sbatch.check(options.sbatch, f"{subject}: sbatch")
    _check_duplicates(options, subject)
    for key in DIRECTIVES:
        value = getattr(options, key)
        texts = value if isinstance(value, tuple) else (str(value),)
        if value is not None and not all(texts):
            raise SpecError(f"{subject}: {key} must not be empty")
    if options.gres is not None and not _GRES.match(options.gres):
        raise SpecError(f"{subject}: gres must be like gpu:a100:4,nvme:1, not {options.gres!r}")
    if not 0 < options.start_timeout_s < float("inf"):
        raise SpecError(f"{subject}: start_timeout_s must be more than 0, not {options.start_timeout_s:g}")
    if options.array_throttle is not None and options.array_throttle < 1:
        raise SpecError(f"{subject}: array_throttle must be 1 or more, not {options.array_throttle}")
    if options.slurm_version is not None and not _VERSION.match(options.slurm_version):
        raise SpecError(f"{subject}: slurm_version must be like '23.11', in quotes, not {options.slurm_version!r}")
    check_lines(options.modules, options.prologue, subject)
    if any(not argv or not argv[0] for argv in options.setup):
        raise SpecError(f"{subject}: setup: a command has no program")
    _check_login(options, subject)


def _check_duplicates(options: SlurmOptions, subject: str) -> None:
    spellings = {option.replace("_", "-"): option for option in options.sbatch}
    for key, directive in DIRECTIVES.items():
        if directive in spellings and getattr(options, key) not in (None, False):
            raise SpecError(f"{subject}: {key} and sbatch: {spellings[directive]} set the same option. Keep one")


def _check_login(options: SlurmOptions, subject: str) -> None:
    if options.login is None:
        for key in ("user", "port", "ssh_config"):
            if getattr(options, key) is not None:
                raise SpecError(f"{subject}: {key} requires `login`, which is not set")
    if options.port is not None and not 0 < options.port <= _LAST_PORT:
        raise SpecError(f"{subject}: port must be 1 to {_LAST_PORT}, not {options.port}")
    if not (options.root == "~" or options.root.startswith(("~/", "/"))):
        raise SpecError(f"{subject}: root must begin with / or ~/, not {options.root!r}")
