"""A job's batch script, its srun command, and the settings that its nodes read, as pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..config import secrets
from ..errors import SpecError
from ..hosts.jobs.options import module_lines
from ..job import FUNCTION_TARGETS, JobSpec, check_cpu
from . import sbatch_options as sbatch
from .options import DIRECTIVES, SlurmOptions

SCHEMA = 1
COMMENT = "accel:"
_BATCH = "slurm/batch.py"
_MAX_WARNING_S = 65535


def check(spec: JobSpec, options: SlurmOptions, name: str) -> None:
    """Raise SpecError for a job that this target cannot run."""
    subject = f"target {name}"
    if spec.calls_function and options.login is not None:
        raise SpecError(f"{subject}: {FUNCTION_TARGETS}")
    if spec.image is not None and options.container is None:
        raise SpecError(f"{subject}: --image needs container: pyxis, apptainer or singularity")
    check_cpu(spec, options.cpu, name)
    if spec.grace_s > _MAX_WARNING_S:
        raise SpecError(f"--grace {spec.grace_s:g}: Slurm sends the warning at most {_MAX_WARNING_S} s before the end")
    gres_gpus = _gpus_in(options.gres)
    if spec.resources.gpus and gres_gpus not in (None, spec.resources.gpus):
        raise SpecError(
            f"{subject}: gres requests {gres_gpus} GPUs per node, and --gpus {spec.resources.gpus}: keep one"
        )
    _check_gpu_type(spec.resources.accelerator, "--accelerator", options, subject)
    _check_gpu_type(options.gpu_type, "gpu_type:", options, subject)
    gpu_options = sbatch.among(options.sbatch, sbatch.GPUS)
    if gpu_options and (spec.resources.gpus or gres_gpus is not None):
        other_option = "gres" if gres_gpus is not None else "--gpus"
        raise SpecError(f"{subject}: sbatch: {gpu_options[0]} and {other_option} both request GPUs: keep one")
    for flag, names in (("--memory", sbatch.MEMORY), ("--cpus", sbatch.CPUS)):
        amount = spec.resources.memory_gb if flag == "--memory" else spec.resources.cpus
        if amount is not None and (keys := sbatch.among(options.sbatch, names)):
            raise SpecError(f"{subject}: sbatch: {keys[0]} and {flag} request the same: keep one")
    secrets.check(spec.secrets, "a slurm target")


def _check_gpu_type(kind: str | None, option: str, options: SlurmOptions, subject: str) -> None:
    """Raise SpecError if `gres` requests the job's GPUs without their type."""
    count, entries = _gpus_in(options.gres), (options.gres or "").split(",")
    if kind is not None and count is not None and not any(entry.startswith(f"gpu:{kind}") for entry in entries):
        raise SpecError(
            f"{subject}: {option} {kind}, and gres: {options.gres} requests the GPUs: write gres: gpu:{kind}:{count}"
        )


def warnings(spec: JobSpec, options: SlurmOptions) -> tuple[str, ...]:
    """Return a warning for each setting without effect, or with a surprising one."""
    messages = []
    others = sbatch.among(options.sbatch, (*sbatch.CPUS, "exclusive"))
    if spec.resources.cpus is None and not options.exclusive and not any(options.sbatch[key] for key in others):
        messages.append("--cpus is not set: Slurm may allocate only one core on each node")
    if spec.time_limit_s is not None and spec.time_limit_s % 60:
        messages.append(f"Slurm counts time limits in minutes: {spec.time_limit_s:g} s become {_minutes(spec)} min")
    if spec.resources.shm_gb is not None:
        messages.append("shm_gb is not enforced on a slurm target")
    if options.slurm_version is not None:
        messages += sbatch.unsupported_options(options.sbatch, options.slurm_version)
    return tuple(messages)


@dataclass(frozen=True)
class JobScript:
    """A job's batch script, and the settings that the batch program and the nodes read.

    directory: the job's, an absolute path on the shared file system.
    python:    runs the batch program on the first node, outside any container.
    code:      the program's directory, if it runs in place; default: the snapshot in the job's directory.
    """

    spec: JobSpec
    options: SlurmOptions
    job_id: str
    directory: str
    _: KW_ONLY
    python: str
    code: str | None = None

    def render(self, after: Sequence[str] = (), tasks: int | None = None) -> str:
        """Return the batch script.

        after: the Slurm ids of the jobs that must succeed first.
        tasks: the number of jobs in the array; this job is the first.
        """
        options = self.options
        lines = ["#!/bin/bash", *(_line(name, value) for name, value in self._directives(after, tasks))]
        if options.modules:
            lines += ["", *module_lines(options.modules)]
        if options.prologue:
            lines += ["", *options.prologue]
        directory = shlex.quote(self.directory)
        # Each task is a job with its own directory; array.json in the first job's directory lists them.
        argument = directory if tasks is None else f"--array {directory}"
        lines += ["", f"exec {shlex.quote(self.python)} -I {directory}/{_BATCH} {argument}"]
        return "\n".join(lines) + "\n"

    def settings(self, pickles: str | None = None) -> dict[str, Any]:
        """Return the settings.

        pickles: submitit's directory, for an array that of its first job; default: one in the job's directory.
        """
        spec, options = self.spec, self.options
        workdir = self.code or f"{self.directory}/code"
        return {
            "schema": SCHEMA,
            "job_id": self.job_id,
            "name": spec.name,
            "nodes": spec.nodes,
            "procs_per_node": spec.procs_per_node or spec.resources.gpus or None,
            "argv": list(spec.argv),
            "entry": spec.entry,
            "env": dict(spec.env),
            "secrets": sorted(spec.secrets),
            "setup": [list(argv) for argv in (*options.setup, *spec.setup)],
            "directory": self.directory,
            "workdir": workdir if spec.workdir == "." else f"{workdir.rstrip('/')}/{spec.workdir}",
            "python": self._node_python,
            "launch": ["--cpu"] if options.cpu else [],
            "grace_s": spec.grace_s,
            "time_limit_s": spec.time_limit_s,
            "max_restarts": spec.retry.max_restarts,
            "start_timeout_s": options.start_timeout_s,
            "interface": options.interface,
            "srun": self._srun(),
            "submitit": self._task(pickles or f"{self.directory}/slurm/pickles"),
        }

    @property
    def _node_python(self) -> str:
        return self.python if self.spec.image is None else self.options.container_python

    def _srun(self) -> list[str]:
        """Return srun and its options: one task per node, with the cores that the job has there.

        All options are explicit because srun does not inherit everything from the job: not `--cpus-per-task` since
        22.05 (https://github.com/SchedMD/slurm, release notes), nor the environment at sites that submit with
        `--export=NONE`.
        """
        argv = [
            "srun",
            f"--nodes={self.spec.nodes}",
            f"--ntasks={self.spec.nodes}",
            "--ntasks-per-node=1",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            "--open-mode=append",
            f"--output={_pattern(self.directory)}/logs/node-%n.log",
        ]
        own = [self.options.sbatch[key] for key in sbatch.among(self.options.sbatch, ("cpus-per-task",))]
        for cpus in own if self.spec.resources.cpus is None else [self.spec.resources.cpus]:
            argv.append(f"--cpus-per-task={cpus}")
        if self.spec.image is not None and self.options.container == "pyxis":
            argv += [f"--container-image={pyxis_image(self.spec.image)}", f"--container-mounts={self._mounts()}"]
        return [*argv, *self.options.srun]

    def _task(self, pickles: str) -> list[str]:
        """Return the command that srun starts on each node: submitit, which calls the job's `NodeMain`."""
        spec, options = self.spec, self.options
        argv = [self._node_python, "-u", "-m", "submitit.core._submit", pickles]
        if spec.image is None or options.container == "pyxis":
            return argv
        has_gpus = spec.resources.gpus or _gpus_in(options.gres) or sbatch.among(options.sbatch, sbatch.GPUS)
        nvidia = ["--nv"] if has_gpus else []
        return [str(options.container), "exec", *nvidia, "--bind", self._mounts(), spec.image, *argv]

    def _mounts(self) -> str:
        directories = [self.directory] if self.code is None else [self.directory, self.code]
        return ",".join([*(f"{path}:{path}" for path in directories), *self.options.container_mounts])

    def _directives(self, after: Sequence[str], tasks: int | None) -> Iterator[tuple[str, str | bool]]:
        spec, options = self.spec, self.options
        yield "job-name", spec.name
        yield "comment", f"{COMMENT}{self.job_id}"
        for key, name in DIRECTIVES.items():
            value = getattr(options, key)
            if value is not None and value is not False:
                yield name, ",".join(value) if isinstance(value, tuple) else value
        yield "nodes", str(spec.nodes)
        yield "ntasks-per-node", "1"
        yield from _resources(spec, options)
        if spec.time_limit_s is not None:
            yield "time", str(_minutes(spec))
        if spec.grace_s:
            yield "signal", f"USR1@{math.ceil(spec.grace_s)}"
        yield ("requeue", True) if spec.retry.max_restarts else ("no-requeue", True)
        if after:
            yield "dependency", "afterok:" + ":".join(after)
            yield "kill-on-invalid-dep", "yes"
        if tasks is not None:
            yield "array", f"0-{tasks - 1}" + (f"%{options.array_throttle}" if options.array_throttle else "")
        yield "chdir", self.directory
        yield "output", f"{_pattern(self.directory)}/{'logs/slurm.log' if tasks is None else 'slurm/%a.log'}"
        yield "open-mode", "append"
        for name, value in options.sbatch.items():
            if value is not False:
                yield name.replace("_", "-"), value if value is True else str(value)


def _resources(spec: JobSpec, options: SlurmOptions) -> Iterator[tuple[str, str]]:
    resources = spec.resources
    if resources.cpus is not None:
        yield "cpus-per-task", str(resources.cpus)
    if resources.memory_gb is not None:
        yield "mem", f"{math.ceil(resources.memory_gb * 1024)}M"
    entries = [options.gres] if options.gres else []
    if resources.gpus and _gpus_in(options.gres) is None:
        kind = resources.accelerator or options.gpu_type
        entries.insert(0, f"gpu:{kind}:{resources.gpus}" if kind else f"gpu:{resources.gpus}")
    if entries:
        yield "gres", ",".join(entries)


def _line(name: str, value: str | bool) -> str:
    """Return a directive. sbatch parses quotes and escapes in it as a shell does. Raises SpecError for a line break."""
    if "\n" in str(value) or "\0" in str(value):
        raise SpecError(f"sbatch --{name} must be one line, not {value!r}")
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _pattern(path: str) -> str:
    """Escape a path for Slurm's file name patterns. Raises SpecError if that is impossible."""
    if "\\" in path:
        raise SpecError(f"Slurm cannot write to a directory whose name holds a backslash: {path!r}")
    if any(f"%{letter}" in path for letter in "jtAa"):
        raise SpecError(f"submitit replaces %j, %t, %A and %a in a directory's name: {path!r}")
    return path.replace("%", "%%")


def pyxis_image(image: str) -> str:
    """Return an image in pyxis' form, with `#` after the registry. Without it, pyxis would assume Docker Hub.

    https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md
    """
    scheme, separator, name = image.rpartition("://")
    registry, slash, repository = name.partition("/")
    has_registry = "." in registry or ":" in registry or registry == "localhost"
    if (
        not (slash and registry and has_registry)
        or "#" in name
        or scheme not in ("", "docker")
        or registry in (".", "..")
    ):
        return image
    return f"{scheme}{separator}{registry}#{repository}"


def _gpus_in(gres: str | None) -> int | None:
    """Return the number of GPUs in a text such as `gpu:a100:4,nvme:1`, or None if it has none."""
    gpu_entries = [entry.split(":") for entry in (gres or "").split(",") if entry.split(":")[0] == "gpu"]
    if not gpu_entries:
        return None
    return sum(int(parts[-1]) if parts[-1].isdigit() else 1 for parts in gpu_entries)


def _minutes(spec: JobSpec) -> int:
    return math.ceil((spec.time_limit_s or 0) / 60)
