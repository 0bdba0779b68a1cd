"""The local target: `accel launch` on this machine, under a supervisor that does not depend on the terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..clean_env import outside_any_job
from ..config import secrets
from ..errors import SchedulerError, SpecError, StoreError, SubmitError, Unreachable
from ..job import Cursor, JobSpec, LogLine, Reason, State, Status, check_cpu
from ..node.logs import last_line
from ..printable import one_line
from ..processes import JOB_MARK, end_all, python_module, signal_name, with_variable
from ..store import atomic_files, log_lines
from ..target import Plan, TargetContext, require_answers
from .job_files import SCHEMA, JobFiles

_LOOK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of a local target in `accel.yaml`.

    concurrency: maximum number of jobs that run at once here; None: as many as its GPUs and processors allow.
    snapshot:    run in a copy of the code as it was at the submit, instead of in place.
    cpu:         train on the CPU even if there is a GPU.
    python:      the interpreter of another environment that has accel installed.
    """

    concurrency: int | None = None
    snapshot: bool = False
    cpu: bool = False
    python: str | None = None


class LocalTarget:
    """A target that runs each job here, detached from the terminal. A job's native id is its job id."""

    Options: ClassVar[type] = LocalOptions

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: LocalOptions = context.options
        self._jobs = context.jobs
        if self._options.concurrency is not None and self._options.concurrency < 1:
            raise SpecError(f"target {self.name}: concurrency must be 1 or more, not {self._options.concurrency}")

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the supervisor's instructions and the command that starts it. Raises SpecError."""
        _check(spec)
        check_cpu(spec, self._options.cpu, self.name)
        command = self._launch_command(spec, str(self._jobs / job_id / "logs"))
        settings = {
            "schema": SCHEMA,
            "job_id": job_id,
            "command": command,
            "code": spec.code,
            "workdir": spec.workdir,
            "snapshot": self._options.snapshot,
            "env": dict(spec.env),
            "secrets": dict(spec.secrets),
            "setup": [list(argv) for argv in spec.setup],
            "after": list(spec.after),
            "gpus": spec.resources.gpus,
            "cpus": spec.resources.cpus,
            "procs_per_node": spec.procs_per_node,
            "cpu_only": self._options.cpu,
            "concurrency": self._options.concurrency,
            "time_limit_s": spec.time_limit_s,
            "grace_s": spec.grace_s,
        }
        return Plan(
            target=self.name,
            kind="local",
            job_id=job_id,
            files={"local/settings.json": json.dumps(settings, indent=2) + "\n"},
            actions=(("python", "-m", "schedulers.local.supervisor", job_id), tuple(command)),
            warnings=_warnings(spec),
        )

    def admit(self, spec: JobSpec) -> None:
        """Reject secrets that are not set, and more GPUs or processors than this machine has."""
        secrets.values(spec.secrets)
        if spec.resources.gpus or spec.resources.cpus or spec.procs_per_node:
            _check_machine(spec, cpu_only=self._options.cpu)

    def submit(self, plan: Plan) -> str:
        """Start the supervisor, unless this job has one or has had one. Raises SubmitError."""
        files = JobFiles(self._jobs / plan.job_id)
        if files.exit() is None and files.supervisor() is None:
            settings = json.loads(plan.files["local/settings.json"])
            try:
                for path, text in plan.files.items():
                    files.write(path, text)
                if settings["snapshot"]:
                    self._pack(settings["code"], files)
                _start_supervisor(files)
            except OSError as error:
                raise SubmitError(f"the job's files cannot be written: {error}") from error
        return plan.job_id

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Read the job directories. A job without a result and without a supervisor's lock is lost.

        Raises Unreachable, with the other answers, for jobs whose lock proves nothing here, and for those whose files
        are damaged.
        """
        statuses: dict[str, Status] = {}
        unreachable: dict[str, str] = {}
        for native_id in native_ids:
            try:
                status = self._status_of(native_id)
            except SchedulerError as error:
                unreachable[native_id] = str(error)
                continue
            if status is not None:
                statuses[native_id] = status
        return require_answers(statuses, unreachable)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the job's log lines, from a cursor."""
        files = JobFiles(self._jobs / native_id)
        yield from log_lines.read(files.logs, since, complete=_complete(files))

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        """Return the cursor of a time, in seconds since the epoch."""
        return log_lines.cursor_at(JobFiles(self._jobs / native_id).logs, when)

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor:
        """Return the cursor of each rank's last `count` lines."""
        files = JobFiles(self._jobs / native_id)
        return log_lines.tail_at(files.logs, since, count, complete=_complete(files))

    def cancel(self, native_id: str) -> None:
        """Have the supervisor end the job (SIGTERM, the job's grace, SIGKILL).

        It is signalled or, on another machine or in another PID namespace, reads a file in the job's directory.
        Raises Unreachable if it is unknown whether the job runs, and StoreError if the file cannot be written.
        """
        files = JobFiles(self._jobs / native_id)
        if files.exit() is not None or not files.supervised():
            return
        supervisor = files.supervisor()
        try:
            files.write("local/cancel", "")
        except OSError as error:
            # SIGINT stands for the request where it cannot be written, as on a full disk.
            if supervisor is None or not supervisor.send(signal.SIGINT):
                raise atomic_files.store_error(error, f"{files.directory}/local/cancel", "write") from error
        if supervisor is not None:
            supervisor.send(signal.SIGTERM)  # it looks for the request

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """Wait for the supervisor and the launcher to end, or for the result if they are not visible from here."""
        files = JobFiles(self._jobs / native_id)
        deadline = time.monotonic() + timeout_s
        supervisor = files.supervisor()
        if supervisor is not None:
            supervisor.wait(timeout_s)  # returns at once for one that runs elsewhere
        while files.in_use() and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, remaining))
        return None

    @staticmethod
    def in_use(directory: Path) -> str:
        """Return why the job of this directory may still run although its record has a final state; else ''."""
        return JobFiles(directory).in_use()

    def _launch_command(self, spec: JobSpec, logs: str) -> list[str]:
        command = [*_accel(self._options.python), "launch"]
        processes = spec.procs_per_node or spec.resources.gpus
        if processes:
            command += ["--num_processes", str(processes)]
        if self._options.cpu:
            command += ["--cpu"]
        if spec.retry.max_restarts:
            command += ["--max_restarts", str(spec.retry.max_restarts)]
        command += ["--shutdown_timeout", f"{spec.grace_s:g}", "--log_dir", logs]
        command += {"script": [], "module": ["-m"], "command": ["--no_python"]}[spec.entry]
        return [*command, "--", *spec.argv]

    def _pack(self, code: str, files: JobFiles) -> None:
        from ..store import snapshot

        packed = snapshot.pack(Path(code), self._jobs.parent)
        files.write("local/snapshot", str(packed.path))

    def _status_of(self, native_id: str) -> Status | None:
        try:
            return self._status(JobFiles(self._jobs / native_id))
        except (OSError, ValueError) as error:  # a native id that is no file name is one of the reasons
            raise StoreError(f"the files of job {native_id!r} cannot be read: {error}") from None

    def _status(self, files: JobFiles) -> Status | None:
        try:
            # Before the result is looked for: a job that ran then, and has no result now, is at work.
            runs = files.supervised()
        except (Unreachable, StoreError):
            if (final_status := files.exit()) is not None:
                return final_status
            raise
        final_status = files.exit()
        if final_status is not None or runs is None:
            return final_status
        if runs:
            return files.progress()
        supervisor, job_id = files.supervisor(), files.directory.name
        if os.environ.get(JOB_MARK) != job_id:  # what its setup commands have left; the launcher leaves nothing
            end_all(lambda: with_variable(JOB_MARK, job_id), grace_s=0.0)
        subject = "its supervisor" if supervisor is None else f"its supervisor (process {supervisor.pid})"
        message = f"{subject} was killed, or the machine restarted, and it left no result"
        return Status(
            state=State.FAILED, reason=Reason.LOST, message=message, attempt=files.attempt(), observed_at=time.time()
        )


def _complete(files: JobFiles) -> bool:
    """Return True if nothing writes to the logs any more. Call it before reading: later text is read the next time."""
    return files.exit() is not None or not files.in_use()


def _accel(python: str | None) -> list[str]:
    """Return the command that starts `accel` with this interpreter.

    The installed script is preferred: `python -m accel` would look for packages in the job's directory first.
    """
    interpreter = os.path.expanduser(python or sys.executable)
    script = os.path.join(os.path.dirname(interpreter), "accel")
    return [script] if os.path.exists(script) else [interpreter, "-m", "accel"]


def _check(spec: JobSpec) -> None:
    if spec.nodes != 1:
        raise SpecError(f"the local target is one machine; {spec.nodes} nodes need another target (accel targets)")
    if spec.image is not None:
        raise SpecError("the local target runs on this machine as it is; --image needs another target")
    secrets.check(spec.secrets, "the local target")
    if spec.resources.accelerator is not None:
        raise SpecError(
            "the local target has the accelerators that this machine has; --accelerator needs another target"
        )


def _warnings(spec: JobSpec) -> tuple[str, ...]:
    unenforced = [name for name in ("memory_gb", "shm_gb") if getattr(spec.resources, name) is not None]
    return tuple(f"{name} is not enforced on the local target" for name in unenforced)


def _check_machine(spec: JobSpec, *, cpu_only: bool) -> None:
    resources, devices = spec.resources, find_devices()
    gpus = len(devices["ids"]) if devices["kind"] in ("cuda", "xpu") else 0
    if resources.gpus > gpus:
        available = _count(gpus, "GPU") if gpus else "no GPU"
        raise SpecError(f"--gpus {resources.gpus}: this machine has {available} (nvidia-smi lists them)")
    if gpus and not cpu_only and (spec.procs_per_node or 0) > gpus:
        raise SpecError(
            f"--procs-per-node {spec.procs_per_node}: this machine has {_count(gpus, 'GPU')} (nvidia-smi lists them), "
            "and every process needs one; `cpu: true` in the target uses processors"
        )
    if (resources.cpus or 0) > devices["cpus"]:
        available = _count(devices["cpus"], "processor")
        raise SpecError(f"--cpus {resources.cpus}: this process may use {available} (nproc counts them)")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def find_devices() -> dict[str, Any]:
    """Return the devices that `accel launch` would find here, from a process of its own.

    Raises SubmitError, with its last line, if a driver's library ends that process.
    """
    import subprocess

    probe = subprocess.run(python_module("accel.launch.devices"), capture_output=True)
    if probe.returncode != 0:
        code = probe.returncode
        outcome = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        lines = probe.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        hint = "`python -m accel.launch.devices` shows it"
        raise SubmitError(f"the probe for this machine's devices {outcome}: {one_line(lines[-1])} ({hint})")
    devices: dict[str, Any] = json.loads(probe.stdout)
    return devices


def _start_supervisor(files: JobFiles) -> None:
    import subprocess

    files.logs.mkdir(exist_ok=True)
    with open(files.logs / "supervisor.txt", "ab") as log:
        process = subprocess.Popen(
            python_module("schedulers.local.supervisor", str(files.directory)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=files.directory,
            env=outside_any_job(os.environ) | {JOB_MARK: files.directory.name},
        )  # fmt: skip
    # The process forks the supervisor, waits until it stands, and ends.
    status = process.wait()
    if status < 0:
        raise Unreachable(f"the process that starts the job's supervisor was killed by signal {-status}")
    if status > 0:
        detail = last_line(str(files.logs / "supervisor.txt"), 500)
        default_detail = "no space is left on its disk" if _is_full(files.directory) else "it said nothing"
        raise SubmitError(f"the job's supervisor did not start: {detail or default_detail}")


def _is_full(directory: Path) -> bool:
    disk = os.statvfs(directory)
    return disk.f_bavail == 0 or (disk.f_files > 0 and disk.f_favail == 0)
