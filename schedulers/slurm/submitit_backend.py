"""submitit's part in a submit: its pickles, names and arrays, with accel's batch script and sbatch call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SubmitError

if TYPE_CHECKING:
    from submitit.core import core, utils

# The pickles' names before the job has a number: the batch program finds them even if the submit is killed after
# sbatch and before submitit renames them.
SINGLE = "job.pkl"
ARRAY_TASK = "job_{}.pkl"


def submit_callables(
    callables: Sequence[Callable[[], Any]],
    *,
    folder: Path,
    script: Path,
    text: str,
    sbatch: Callable[[Path], str],
    nodes: int,
    array: bool,
) -> str:
    """Submit callables with a batch script, several as one array. Return the number of the job or array.

    folder: the directory of the pickles.
    script: the path of the batch script, whose content is `text`.
    sbatch: hands it to Slurm and returns sbatch's output.
    nodes:  of each job, with one task each.

    Raises SubmitError without submitit, and what `sbatch` raises.
    """
    try:
        from submitit.slurm.slurm import SlurmExecutor, SlurmJob
    except ImportError as error:
        remedy = "pip install 'accel-launch[slurm]'"
        raise SubmitError(f"submitit is missing ({error.name} cannot be imported): {remedy}") from None

    class BatchExecutor(SlurmExecutor):
        def _num_tasks(self) -> int:
            return nodes

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return text

        def _internal_process_submissions(
            self, delayed_submissions: list[utils.DelayedSubmission]
        ) -> list[core.Job[Any]]:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            pickles = [_dump(delayed, self.folder, index, array) for index, delayed in enumerate(delayed_submissions)]
            first = self._submit_command("")
            jobs = [first]
            if array:
                tasks = [f"{first.job_id}_{task}" for task in range(len(pickles))]
                jobs = [SlurmJob(folder=self.folder, job_id=task, tasks=range(nodes)) for task in tasks]
            for job, pickle in zip(jobs, pickles, strict=True):
                with contextlib.suppress(FileExistsError):  # the batch program did it first
                    os.link(pickle, job.paths.submitted_pickle)
            return jobs

        def _submit_command(self, command: str) -> core.Job[Any]:
            # Not the inherited one: it runs sbatch in the environment of this process, as it is.
            content = self._make_submission_file_text(command, "")
            script.write_text(content, encoding="utf-8", errors="surrogateescape")
            job_id = self._get_job_id_from_submission_command(sbatch(script))
            return SlurmJob(folder=self.folder, job_id=job_id, tasks=range(nodes))

    try:
        executor = BatchExecutor(folder)
    except RuntimeError as error:  # it looks for srun
        raise SubmitError(str(error)) from None
    return str(executor.submit_array(list(callables))[0].job_id).partition("_")[0]


def _dump(delayed: utils.DelayedSubmission, folder: Path, task: int, array: bool) -> Path:
    pickle = folder / (ARRAY_TASK.format(task) if array else SINGLE)
    delayed.dump(pickle.with_suffix(".new"))
    os.replace(pickle.with_suffix(".new"), pickle)
    return pickle
