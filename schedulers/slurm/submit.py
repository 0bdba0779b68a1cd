"""Submission of a job or an array on a machine with sbatch: exactly once, even if repeated or interrupted.

    D/slurm/submitting      written before sbatch is called; if it is missing, sbatch was never called
    D/slurm/submitted.json  Slurm's job number, written when sbatch has returned

In between, the job is found by its comment. As a program, this module reads one JSON request and prints one
JSON response.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clean_env import for_sbatch
from ..errors import SchedulerError, SubmitError, Unreachable
from ..hosts.bundle import pack
from ..node import jobs
from ..store import atomic_files
from .batch.unanswered import is_unanswered
from .login import job_ops
from .login import slurm_commands as commands
from .login.squeue_cache import try_lock

SCHEMA = 1
PROGRAM = "slurm/batch.py"
_SBATCH_S = 180.0
_LOCK_S = 60.0


def submit(request: Mapping[str, Any]) -> str:
    """Write the jobs' files on the shared file system, call sbatch, and return Slurm's job number.

    The request has `root`, `jobs` (each with `id`, `settings` and `spec`), `array`, `script`, `nodes`, `secrets`
    (values), `unset` (variables that sbatch must not see) and `clusters`. Raises SubmitError when Slurm refuses,
    and Unreachable when it is unknown whether Slurm has the job.
    """
    if request.get("schema") != SCHEMA:
        raise SubmitError("the login node has another version of accel: install the same version on both machines")
    job_ids = [str(job["id"]) for job in request["jobs"]]
    first = _directory(request, job_ids[0])
    try:
        os.makedirs(f"{first}/slurm", mode=0o700, exist_ok=True)
        with _job_lock(f"{first}/slurm/submit.lock") as lock:
            slurm = _earlier(request, job_ids[0])
            if slurm is None:
                slurm = _submit(request, first, lock)
            _write_numbers(request, job_ids, slurm)
    except OSError as error:
        problem = str(atomic_files.store_error(error, error.filename or first, "write"))
        if os.path.exists(f"{first}/slurm/submitting"):  # Slurm may have the job
            raise Unreachable(problem) from None
        raise SubmitError(problem) from None
    return slurm


def _directory(request: Mapping[str, Any], job_id: str) -> str:
    return str(jobs.directory_of(os.path.expanduser(request["root"]), {"job": job_id}))


@contextlib.contextmanager
def _job_lock(path: str) -> Iterator[int]:
    """Hold the job's lock. sbatch inherits it: no second one starts while a killed submit's may still succeed."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_S
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise Unreachable("another submit of this job is still running sbatch")
            time.sleep(0.05)
        yield lock
    finally:
        os.close(lock)


def _earlier(request: Mapping[str, Any], job_id: str) -> str | None:
    root = os.path.expanduser(request["root"])
    try:
        return job_ops.earlier(root, job_id, array=request["array"], clusters=request["clusters"])
    except commands.Unanswered as error:
        raise Unreachable(f"cannot check whether Slurm has the job from an earlier submit: {error}") from None
    except job_ops.REFUSALS as error:
        raise SubmitError(str(error)) from None


def _submit(request: Mapping[str, Any], first: str, lock: int) -> str:
    from .node import NodeMain
    from .submitit_backend import submit_callables

    if shutil.which("sbatch") is None:
        raise SubmitError(f"sbatch not found: {commands.NO_LOGIN_NODE}")
    directories = [_directory(request, job["id"]) for job in request["jobs"]]
    for directory, job in zip(directories, request["jobs"], strict=True):
        _write_job(directory, job, request["secrets"])
    if request["array"]:
        _write(f"{first}/slurm/array.json", json.dumps({"schema": SCHEMA, "directories": directories}) + "\n")
    try:
        return submit_callables(
            [NodeMain(path) for path in directories],
            folder=Path(first) / "slurm/pickles",
            script=Path(first) / "slurm/script.sh",
            text=request["script"],
            sbatch=lambda script: _sbatch(script, request, f"{first}/slurm/submitting", lock),
            nodes=request["nodes"],
            array=request["array"],
        )
    except SubmitError:
        for directory in directories:
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/slurm/secrets.json")
        raise


@functools.cache
def program() -> bytes:
    """Return the program that a batch script runs on a job's first node, for the job's directory.

    It is a zip file, despite its name, that any Python from 3.8 on runs: `python -I batch.py DIRECTORY`.
    """
    return pack("schedulers.slurm.batch", "main(sys.argv[1:])")


def _write_job(directory: str, job: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
    for name in ("slurm", "logs"):
        os.makedirs(f"{directory}/{name}", mode=0o700, exist_ok=True)
    _write(f"{directory}/slurm/settings.json", json.dumps(job["settings"], indent=2) + "\n")
    _write(f"{directory}/slurm/spec.json", json.dumps(job["spec"]) + "\n")
    atomic_files.replace_file(f"{directory}/{PROGRAM}", program())
    if secrets:
        _write(f"{directory}/slurm/secrets.json", json.dumps(dict(secrets)))


def _sbatch(script: Path, request: Mapping[str, Any], marker: str, lock: int) -> str:
    """Return sbatch's output. sbatch may survive this process, and holds the lock until it ends."""
    cluster_options = ["-M", str(request["clusters"])] if request["clusters"] else []
    env = {
        name: value for name, value in for_sbatch(os.environ, request["script"]).items() if name not in request["unset"]
    }
    _write(marker, f"{os.uname().nodename} {os.getpid()}\n", durable=True)
    process = subprocess.Popen(
        ["sbatch", *cluster_options, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=script.parent,
        env=env,
        pass_fds=(lock,),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_SBATCH_S)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"sbatch did not respond within {_SBATCH_S:g} s") from None
    if process.returncode < 0:
        raise Unreachable(f"sbatch was killed by signal {-process.returncode}")
    if process.returncode != 0:
        raise _submit_error(commands.complaint(err.decode("utf-8", "replace")))
    output = out.decode("utf-8", "replace")
    if not any(token.isdigit() for token in output.split()):
        raise Unreachable(f"no job number in sbatch's output: {commands.complaint(output)}")
    return output


def _submit_error(message: str) -> SchedulerError:
    if is_unanswered(message):
        return Unreachable(f"sbatch: {message}")
    return SubmitError(f"sbatch: {message}")


def _write_numbers(request: Mapping[str, Any], job_ids: Sequence[str], slurm: str) -> None:
    for task, job_id in enumerate(job_ids):
        directory = _directory(request, job_id)
        if os.path.exists(f"{directory}/slurm/submitted.json"):
            continue
        number = f"{slurm}_{task}" if request["array"] else slurm
        document = {"schema": SCHEMA, "slurm": number, "first": job_ids[0], "at": time.time()}
        # Only the first is flushed to disk: it has the array's number, and there may be thousands.
        _write(f"{directory}/slurm/submitted.json", json.dumps(document) + "\n", durable=task == 0)


def _write(path: str, content: str, *, durable: bool = False) -> None:
    """Write the file atomically; with `durable`, also to disk."""
    atomic_files.replace_file(path, content.encode("utf-8", "surrogateescape"), durably=durable)


def main() -> None:
    os.umask(0o077)
    commands.extend_path()
    reply: dict[str, Any]
    try:
        reply = {"slurm": submit(json.loads(sys.stdin.buffer.readline()))}
    except SchedulerError as error:
        reply = {"error": str(error), "unreachable": isinstance(error, Unreachable)}
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
