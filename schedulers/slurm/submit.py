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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..clean_env import for_sbatch
from ..errors import SchedulerError, SubmitError, Unreachable
from ..hosts.bundle import pack
from ..node import jobs
from ..store import atomic_files
from .batch.unanswered import is_unanswered
from .login import job_ops
from .login import slurm_commands as commands
from .login.squeue_cache import try_lock

if TYPE_CHECKING:
    from submitit.core import core, utils
    from submitit.slurm.slurm import SlurmExecutor

SCHEMA = 1
PROGRAM = "slurm/batch.py"
_SBATCH_S = 180.0
_LOCK_S = 60.0
# The pickles' names before the job has a number: the batch program finds them even if the submit is killed after
# sbatch and before submitit's names are linked to them.
SINGLE = "job.pkl"
ARRAY_TASK = "job_{}.pkl"


def submit(request: Mapping[str, Any]) -> str:
    """Write the jobs' files on the shared file system, call sbatch, and return Slurm's job number.

    The request has `root`, `jobs` (each with `id`, `settings` and `spec`), `array`, `script`, `secrets` (values),
    `unset` (variables that sbatch must not see) and `clusters`. Raises SubmitError when Slurm refuses, and
    Unreachable when it is unknown whether Slurm has the job.
    """
    if request.get("schema") != SCHEMA:
        raise SubmitError("the login node has another version of accel: install the same version on both machines")
    submission = _Submission(request)
    try:
        return submission.run()
    except OSError as error:
        problem = str(atomic_files.store_error(error, error.filename or submission.directories[0], "write"))
        if os.path.exists(submission.marker):  # Slurm may have the job
            raise Unreachable(problem) from None
        raise SubmitError(problem) from None


@functools.cache
def program() -> bytes:
    """Return the program that a batch script runs on a job's first node, for the job's directory.

    It is a zip file, despite its name, that any Python from 3.8 on runs: `python -I batch.py DIRECTORY`.
    """
    return pack("schedulers.slurm.batch", "main(sys.argv[1:])")


class _Submission:
    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._is_array: bool = request["array"]
        self._root = os.path.expanduser(request["root"])
        self._job_ids = [str(job["id"]) for job in request["jobs"]]
        self.directories = [jobs.directory_of(self._root, {"job": job_id}) for job_id in self._job_ids]
        self._own = f"{self.directories[0]}/slurm"
        self.marker = f"{self._own}/submitting"

    def run(self) -> str:
        os.makedirs(self._own, mode=0o700, exist_ok=True)
        with self._job_lock() as lock:
            number = self._earlier()
            if number is None:
                number = self._submit(lock)
            self._write_numbers(number)
        return number

    @contextlib.contextmanager
    def _job_lock(self) -> Iterator[int]:
        """Hold the job's lock. sbatch inherits it: no second one starts while a killed submit's may still succeed."""
        lock = os.open(f"{self._own}/submit.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_S
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise Unreachable("another submit of this job is still running sbatch")
                time.sleep(0.05)
            yield lock
        finally:
            os.close(lock)

    def _earlier(self) -> str | None:
        clusters = self._request["clusters"]
        try:
            return job_ops.earlier(self._root, self._job_ids[0], array=self._is_array, clusters=clusters)
        except commands.Unanswered as error:
            raise Unreachable(f"cannot check whether Slurm has the job from an earlier submit: {error}") from None
        except job_ops.REFUSALS as error:
            raise SubmitError(str(error)) from None

    def _submit(self, lock: int) -> str:
        from .node import NodeMain

        if shutil.which("sbatch") is None:
            raise SubmitError(f"sbatch not found: {commands.NO_LOGIN_NODE}")
        for directory, job in zip(self.directories, self._request["jobs"], strict=True):
            _write_job(directory, job, self._request["secrets"])
        if self._is_array:
            array = {"schema": SCHEMA, "directories": self.directories}
            _write(f"{self._own}/array.json", json.dumps(array) + "\n")
        try:
            executor = self._executor(lock)
            first, *_ = executor.submit_array([NodeMain(path) for path in self.directories])
        except SubmitError:
            for directory in self.directories:
                with contextlib.suppress(OSError):
                    os.unlink(f"{directory}/slurm/secrets.json")
            raise
        return first.job_id.partition("_")[0]

    def _executor(self, lock: int) -> SlurmExecutor:
        """Return submitit's executor: its pickles, names and arrays, with accel's batch script and sbatch call."""
        try:
            from submitit.slurm.slurm import SlurmExecutor, SlurmJob
        except ImportError as error:
            remedy = "pip install 'accel-launch[slurm]'"
            raise SubmitError(f"submitit is missing ({error.name} cannot be imported): {remedy}") from None
        submission = self

        class BatchExecutor(SlurmExecutor):
            def _internal_process_submissions(
                self, delayed_submissions: list[utils.DelayedSubmission]
            ) -> list[core.Job[Any]]:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                is_array = submission._is_array
                pickles = [
                    self.folder / (ARRAY_TASK.format(task) if is_array else SINGLE)
                    for task in range(len(delayed_submissions))
                ]
                for delayed, pickle in zip(delayed_submissions, pickles, strict=True):
                    delayed.dump(pickle.with_suffix(".new"))
                    os.replace(pickle.with_suffix(".new"), pickle)
                number = self._get_job_id_from_submission_command(submission._sbatch(lock))
                job_ids = [f"{number}_{task}" for task in range(len(pickles))] if is_array else [number]
                slurm_jobs: list[core.Job[Any]] = [SlurmJob(folder=self.folder, job_id=job_id) for job_id in job_ids]
                for job, pickle in zip(slurm_jobs, pickles, strict=True):
                    with contextlib.suppress(FileExistsError):  # the batch program did it first
                        os.link(pickle, job.paths.submitted_pickle)
                return slurm_jobs

        try:
            return BatchExecutor(f"{self._own}/pickles")
        except RuntimeError as error:  # it looks for srun
            raise SubmitError(str(error)) from None

    def _sbatch(self, lock: int) -> str:
        """Return sbatch's output. sbatch may survive this process, and holds the lock until it ends."""
        # Not submitit's call: it runs sbatch in the environment of this process, as it is.
        text = self._request["script"]
        script = Path(self._own) / "script.sh"
        script.write_text(text, encoding="utf-8", errors="surrogateescape")
        env = {
            name: value for name, value in for_sbatch(os.environ, text).items() if name not in self._request["unset"]
        }
        _write(self.marker, f"{os.uname().nodename} {os.getpid()}\n", durable=True)
        process = subprocess.Popen(
            ["sbatch", *commands.cluster_flags(self._request), str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._own,
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
            message = commands.complaint(err.decode("utf-8", "replace"))
            raise (Unreachable if is_unanswered(message) else SubmitError)(f"sbatch: {message}")
        output = out.decode("utf-8", "replace")
        if not any(token.isdigit() for token in output.split()):
            raise Unreachable(f"no job number in sbatch's output: {commands.complaint(output)}")
        return output

    def _write_numbers(self, number: str) -> None:
        for task, directory in enumerate(self.directories):
            path = f"{directory}/slurm/submitted.json"
            if os.path.exists(path):
                continue
            slurm = f"{number}_{task}" if self._is_array else number
            document = {"schema": SCHEMA, "slurm": slurm, "first": self._job_ids[0], "at": time.time()}
            # Only the first is flushed to disk: it has the array's number, and there may be thousands.
            _write(path, json.dumps(document) + "\n", durable=task == 0)


def _write_job(directory: str, job: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
    for name in ("slurm", "logs"):
        os.makedirs(f"{directory}/{name}", mode=0o700, exist_ok=True)
    _write(f"{directory}/slurm/settings.json", json.dumps(job["settings"], indent=2) + "\n")
    _write(f"{directory}/slurm/spec.json", json.dumps(job["spec"]) + "\n")
    atomic_files.replace_file(f"{directory}/{PROGRAM}", program())
    if secrets:
        _write(f"{directory}/slurm/secrets.json", json.dumps(dict(secrets)))


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
