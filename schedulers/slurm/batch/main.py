"""One start of a Slurm job, on its first node.

Counts the start, runs the step with the nodes' launchers, collects their reports, and writes how the job
ended or requeues it.

    batch.py DIRECTORY           a job; its directory is on a file system that all nodes share
    batch.py --array DIRECTORY   a task of an array: DIRECTORY/slurm/array.json lists the tasks' directories

Exits with the exit code of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback

from ...node import logs
from . import outcome, shared_files, slurm
from .step import Step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Document = dict[str, Any]

_MARKS = "ACCEL_"


class Batch:
    """One start of a job. Its number is the first attempt of its ranks."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.own = os.path.join(directory, "slurm")
        self.settings: Document = shared_files.read(os.path.join(self.own, "settings.json"))
        if not isinstance(self.settings, dict) or self.settings.get("schema") != shared_files.SCHEMA:
            raise slurm.Problem(self._path("settings.json") + " cannot be read, or is from another accel version")
        self.job = slurm.own_job()
        self.starts_before = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.attempt = self._newest() + 1
        self.terminated = False

    def run(self) -> int:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_end)
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            signal.signal(signum, lambda *_: None)  # the ranks get their own
        result = shared_files.read(os.path.join(self.directory, "exit.json"))
        if result is not None:
            slurm.log("this job has ended: " + os.path.join(self.directory, "exit.json"))
            return int(result.get("exit_code") or 0)
        shared_files.preallocate(self._path("spare"))
        try:
            status = self._before()
            if status is not None:
                return self._finish(status)
            return self._act(self._step())
        except (slurm.Problem, OSError) as problem:
            return self._finish(self._status("failed", "setup", slurm.text_of(problem), 1))
        except Exception as error:  # a defect of ours must not lose the job
            traceback.print_exc()
            message = f"defect in accel: {error!r} (see logs/slurm.log)"
            return self._finish(self._status("failed", "setup", message, 1))

    def _before(self) -> Document | None:
        """Count this start and raise the fence. Return the job's end if it must not start, else None."""
        shared_files.write(self._path("attempt"), f"{self.attempt}\n", self._path("spare"))
        names = slurm.node_names()
        self.master = slurm.address_of(self.settings["interface"]) or slurm.reachable(names[0])
        self.port, self._held = slurm.hold_port(int(os.environ["SLURM_JOB_ID"]))
        self.names = names
        start = {"attempt": self.attempt, "restart_count": self.starts_before, "slurm_job": self.job, "nodes": names,
                 "port": self.port, "master": self.master, "at": time.time()}  # fmt: skip
        shared_files.append(self._path("attempts.jsonl"), start)
        if shared_files.exists(self._path("cancel")):
            return self._status("cancelled", "user", "cancelled before its ranks were started", None)
        if self.attempt > int(self.settings["max_restarts"]):
            ends = logs.json_lines(self._path("ends.jsonl"))
            last = ends[-1] if ends and ends[-1]["start"] == self._last_start else None
            return outcome.restart_limit_status(self.settings, self.attempt, last) if self.attempt else None
        return None

    def _step(self) -> outcome.Observations:
        env = {name: value for name, value in os.environ.items() if not name.startswith(_MARKS)}
        env.update(
            ACCEL_JOB_ID=self.settings["job_id"],
            ACCEL_ATTEMPT=str(self.attempt),
            ACCEL_MASTER=self.master,
            ACCEL_PORT=str(self.port),
            ACCEL_NODE_NAMES=",".join(self.names),
            SUBMITIT_EXECUTOR="slurm",
            SUBMITIT_LOG_LEVEL="WARNING",  # its messages do not belong in the job's log
            SUBMITIT_PREEMPT_SIGNAL="URG",  # a signal that nothing sends: accel handles preemption
        )
        observations = outcome.Observations(self.settings, self.attempt, self.names)
        observations.runs_before = self.starts_before
        self.step = Step(self.directory, env, observations, lambda: self.terminated)
        self.step.run()
        observations.attempt = max(self.attempt, self._newest())
        observations.terminated = self.terminated
        observations.cancel = shared_files.exists(self._path("cancel"))
        if not observations.succeeded and not observations.cancel:
            observations.slurm = slurm.facts(self.job)
        return observations

    def _act(self, observations: outcome.Observations) -> int:
        if shared_files.fenced(self._path("attempt"), self.attempt):
            slurm.log("a later start of this job has begun: this one stops here")
            return 1
        end = outcome.decide_outcome(observations)
        if self.step.clock.full:
            end.status["message"] = "; ".join(filter(None, (end.status["message"], logs.FULL)))
        if end.do != "again":
            self.step.finish()
        if end.do == "finish":
            return self._finish(end.status)
        record = dict(end.status, start=self.attempt, at=time.time())
        with contextlib.suppress(OSError):
            shared_files.append(self._path("ends.jsonl"), record)
        code = int(end.status["exit_code"] or 1)
        if end.do == "leave":
            return code
        refusal = slurm.requeue(self.job, self.starts_before, lambda: self.terminated)
        if refusal is None:
            slurm.log("attempt {}: {}; it is requeued".format(observations.attempt, end.status["message"]))
            slurm.await_end(lambda: self.terminated)
            return code
        self.step.finish()
        end.status["message"] += "; Slurm refused to requeue it: " + refusal
        return self._finish(end.status)

    def _finish(self, status: Document) -> int:
        """Write the job's result, once and for all. Return this program's exit code."""
        path = os.path.join(self.directory, "exit.json")
        problem = shared_files.write_once(path, dict(status, observed_at=time.time()), self._path("spare"))
        # Without a result Slurm may start the job again, and its ranks need their secrets.
        for name in ("spare", *(() if problem else ("secrets.json",))):
            with contextlib.suppress(OSError):
                os.unlink(self._path(name))
        state, message = status["state"], status["message"] or "all ranks ended with 0"
        slurm.log(problem or (state if message == state else f"{state}: {message}"))
        if status["state"] == "cancelled" and not self.terminated and slurm.cancel(self.job):
            slurm.await_end(lambda: self.terminated)  # so that Slurm's own records say that it was cancelled
        return int(status["exit_code"] if status["exit_code"] is not None else status["state"] != "succeeded")

    def _status(self, state: str, reason: str, message: str, code: int | None) -> Document:
        """Return the result of a start without ranks."""
        return outcome.Observations(self.settings, self.attempt, []).status(state, reason, message, code)

    def _newest(self) -> int:
        """Return the number of the newest attempt that has begun, or -1."""
        starts = logs.json_lines(self._path("attempts.jsonl"))
        self._last_start = starts[-1]["attempt"] if starts else -1
        launched_attempt = logs.newest_attempt(os.path.join(self.directory, "logs", "launch.jsonl")) if starts else None
        return max(self._last_start, -1 if launched_attempt is None else launched_attempt)

    def _path(self, name: str) -> str:
        return os.path.join(self.own, name)

    def _on_end(self, *_: object) -> None:
        self.terminated = True


def directory_of(argv: list[str]) -> str:
    """Return the directory of this start's job."""
    if argv[:1] != ["--array"]:
        return argv[0]
    array = shared_files.read(os.path.join(argv[1], "slurm", "array.json"))
    try:
        return str(array["directories"][int(os.environ["SLURM_ARRAY_TASK_ID"])])
    except (TypeError, KeyError, ValueError, IndexError):
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        raise slurm.Problem(f"{argv[1]}/slurm/array.json names no job for task {task}") from None


def main(argv: list[str]) -> NoReturn:
    try:
        code = Batch(os.path.abspath(directory_of(argv))).run()
    except (slurm.Problem, OSError) as problem:
        slurm.log(slurm.text_of(problem))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
