"""The supervisor of a local job: it waits for the job's turn, runs `accel launch` and writes the result.

It has left the terminal's session, holds no file of the submitting process, and is the adoptive parent of
everything that the job starts. If it is killed, the kernel signals `accel launch` (PR_SET_PDEATHSIG), which
ends the ranks. Both hold the job's lock, which is free only when both have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from ..config import secrets
from ..errors import SchedulerError, StoreError, Unreachable
from ..hosts.supervisor.documents import AtomicJsonFile, preallocate
from ..hosts.supervisor.slots import NotEnoughSlots, Slots, lock_soon, required_slots, visible
from ..job import Reason, State, Status
from ..node.logs import BLOCK, FULL, Clock, last_line
from ..node.redaction import redact
from ..processes import (
    JOB_MARK,
    Identity,
    adopt_orphans,
    as_exit_code,
    descendants,
    die_with_parent,
    end_all,
    not_ended,
    signal_name,
    wake_pipe,
)
from ..store import atomic_files
from ..store.store import Store
from .job_files import SCHEMA, JobFiles
from .target import find_devices

# Bytes that are reserved on the disk before the ranks start, which may fill it.
_RESULT_ROOM = 1 << 16
_NOTE_ROOM = 1 << 12
_REPORT_ROOM = 1 << 14
_REPORTS = ("launch.jsonl", "node-0.log")
_WRITE_TRIES = 60

_KILL_ALLOWANCE_S = 6.0
_LEFTOVER_GRACE_S = 2.0
_AGAIN_S = 5.0
_NOTE_S = 1.0
_MAX_MESSAGE = 500


class Supervisor:
    """The supervisor of one job."""

    def __init__(self, files: JobFiles, lock: int) -> None:
        """Prepare the job. `lock`: descriptor of the job's lock, which this process holds."""
        self._files = files
        self._lock = lock
        self._settings = files.settings()
        home = files.directory.parent.parent
        self._store = Store(home)
        self._record = self._store.record(self._settings["job_id"])
        self._slots = Slots(home, self._settings["job_id"])
        self._clock = Clock(str(files.logs))
        self._result = AtomicJsonFile(str(files.directory / "exit.json"), _RESULT_ROOM)
        self._progress = AtomicJsonFile(str(files.directory / "local/progress.json"), _NOTE_ROOM)
        self._cancel_file = str(files.directory / "local/cancel")
        self._secrets: dict[str, str] = {}
        self._cancelled = self._terminated = False
        self._woken, self._waker = wake_pipe()
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, self._on_cancel)
        signal.signal(signal.SIGTERM, self._on_terminate)

    def run(self) -> Status:
        """Run the job from its place in the queue to its final status, which is on disk when this returns."""
        try:
            self._await_dependencies()
            env = self._await_slots()
            status = self._set_up(env) or self._launch(env)
        except _NotLaunched as error:
            status = error.status
        except (SchedulerError, OSError) as error:
            status = Status(state=State.FAILED, reason=Reason.SETUP, message=str(error))
        except Exception as error:  # our defect must not lose the job
            traceback.print_exc()
            log_path = self._files.logs / "supervisor.txt"
            status = Status(
                state=State.FAILED, reason=Reason.SETUP, message=f"defect in accel: {error!r} (see {log_path})"
            )
        self._finish(status)
        return status

    def register(self) -> None:
        """Record that the job has a supervisor, so that it is found if the submit is killed now.

        Raises OSError, StoreError.
        """
        self._record.update(Status(state=State.QUEUED), native_id=self._settings["job_id"])
        identity = Identity.of(os.getpid())
        assert identity is not None  # this process lives
        self._files.set_supervisor(identity)

    def enqueue(self) -> None:
        """Enter the queue at once, in the order of the submits, unless the job waits for another one.

        If that fails, it is retried later.
        """
        if not self._settings["after"]:
            with contextlib.suppress(OSError):
                self._slots.enqueue()

    def _on_cancel(self, *_: object) -> None:
        self._cancelled = True  # no cancel request could be written

    def _on_terminate(self, *_: object) -> None:
        self._terminated = True  # with a cancel request it is a cancel, else somebody else's, as at a shutdown

    def _must_end(self) -> bool:
        self._cancelled = self._cancelled or os.path.exists(self._cancel_file)
        return self._cancelled or self._terminated

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal or the end of a child."""
        select.select([self._woken], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _check_end(self) -> None:
        if self._must_end():
            raise _NotLaunched(self._ended("cancelled before it started"))

    def _ended(self, message: str, **fields: Any) -> Status:
        """Return the final status of a job that was cancelled (`message`) or whose supervisor received SIGTERM."""
        if self._cancelled:
            return Status(state=State.CANCELLED, reason=Reason.USER, message=message, **fields)
        message = "its supervisor received SIGTERM, as at a shutdown of the machine"
        return Status(state=State.FAILED, reason=Reason.NODE_FAILURE, message=message, **fields)

    def _set_status(self, state: State, message: str = "", reason: Reason = Reason.NONE) -> None:
        status = Status(state=state, reason=reason, message=message, observed_at=time.time())
        with contextlib.suppress(OSError, StoreError):  # a full disk must not end a training run
            self._progress.write({"schema": SCHEMA, **status.to_json()})
            self._record.update(status)

    def _await_dependencies(self) -> None:
        for job_id in self._settings["after"]:
            self._set_status(State.QUEUED, f"waits for job {job_id} to succeed", Reason.DEPENDENCY)
            # In a thread: a target of another kind may take long to answer, and a cancel does not wait for it.
            dependency = ThreadPoolExecutor(1).submit(self._wait_for, job_id)
            dependency.add_done_callback(lambda _: os.write(self._waker, b"\0"))
            while not dependency.done():
                self._check_end()
                self._sleep(_NOTE_S)
            status = dependency.result()
            if status.state is not State.SUCCEEDED:
                message = f"job {job_id} (--after) {status.state.value}"
                raise _NotLaunched(Status(state=State.CANCELLED, reason=Reason.DEPENDENCY, message=message))

    def _wait_for(self, job_id: str) -> Status:
        """Wait until the job is over. Retry while the store or the backend cannot be read."""
        from ..jobs.handle import find

        while True:
            try:
                return find(job_id, self._store).wait()
            except (StoreError, Unreachable) as error:
                print(f"job {job_id}: {error}", file=sys.stderr, flush=True)
                time.sleep(_AGAIN_S)

    def _await_slots(self) -> dict[str, str]:
        """Wait for the job's turn, GPUs and processors; return the environment that makes only those GPUs visible."""
        self._slots.enqueue()
        devices = find_devices()
        requests = required_slots(self._settings, devices)
        last_reason = ""
        while True:
            self._check_end()
            try:
                slot_names, reason = self._slots.try_acquire(requests)
            except NotEnoughSlots as error:
                raise _NotLaunched(Status(state=State.FAILED, reason=Reason.NO_CAPACITY, message=str(error))) from None
            if not reason:
                return visible(slot_names, devices)
            if reason != last_reason:
                self._set_status(State.QUEUED, reason, Reason.NO_CAPACITY)
            last_reason = reason
            self._sleep(self._slots.pause_s)

    def _environment(self, devices: dict[str, str]) -> dict[str, str]:
        self._secrets = secrets.values(self._settings["secrets"])
        env = {**os.environ, **devices, **self._settings["env"], **self._secrets}
        if self._secrets:
            env["ACCEL_SECRETS"] = ",".join(self._secrets)
        env[JOB_MARK] = self._settings["job_id"]
        env["ACCEL_JOB_DIR"] = str(self._files.directory)
        return env

    @functools.cached_property
    def _directory(self) -> Path:
        """The directory that the program runs in; a snapshot is unpacked on first access."""
        code = Path(self._settings["code"])
        snapshot_path = self._files.read("local/snapshot")
        if snapshot_path is not None:
            from ..store import snapshot

            code = self._files.directory / "code"
            snapshot.unpack(Path(snapshot_path), code)
        return code / str(self._settings["workdir"])

    def _set_up(self, devices: dict[str, str]) -> Status | None:
        """Run the setup commands; return the final status if one fails."""
        env, own_pid = self._environment(devices), os.getpid()
        for argv in self._settings["setup"]:
            with open(self._files.logs / "setup.log", "ab") as log:
                command = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._directory, env=env,
                    preexec_fn=lambda: die_with_parent(signal.SIGKILL, own_pid),
                )  # fmt: skip
            returncode = self._watch(command, None)
            if self._must_end():
                end_all(lambda: descendants(own_pid), grace_s=_LEFTOVER_GRACE_S)
                return self._ended("cancelled during its setup", exit_code=as_exit_code(returncode))
            if returncode != 0:
                message = f"the setup command {argv[0]!r} failed with exit code {returncode}"
                return Status(
                    state=State.FAILED, reason=Reason.SETUP, exit_code=as_exit_code(returncode), message=message
                )
        return None

    def _launch(self, devices: dict[str, str]) -> Status:
        command = self._settings["command"]
        directory, env, own_pid = self._directory, self._environment(devices), os.getpid()
        for name in _REPORTS:
            preallocate(str(self._files.logs / name), _REPORT_ROOM)
        preallocate(f"{self._record.path}/events.jsonl", _NOTE_ROOM)
        with open(self._files.logs / "node-0.log", "ab") as log:
            launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory,
                pass_fds=(self._lock, *self._slots.fds),
                env=env | {"ACCEL_JOB_LOCK": str(self._lock), "ACCEL_JOB_SLOTS": ",".join(map(str, self._slots.fds))},
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, own_pid),
            )  # fmt: skip
        self._set_status(State.RUNNING)
        code = self._watch(launcher, self._settings["time_limit_s"])
        end_all(lambda: descendants(own_pid), grace_s=min(self._settings["grace_s"], _LEFTOVER_GRACE_S))
        status, warnings = self._outcome(code), (FULL if self._clock.full else "", not_ended(own_pid))
        return dataclasses.replace(status, message="; ".join(filter(None, (status.message, *warnings))))

    def _watch(self, process: subprocess.Popen[bytes], limit_s: float | None) -> int:
        """Wait for the process to end; end it in order if the job is cancelled or its time is up."""
        grace_s = self._settings["grace_s"]
        limit = None if limit_s is None else time.monotonic() + limit_s
        kill_at: float | None = None
        self._timed_out = False
        while (code := process.poll()) is None:
            now = time.monotonic()
            if kill_at is None and (self._must_end() or (limit is not None and now >= limit)):
                self._timed_out = not self._must_end()
                kill_at = now + grace_s + _KILL_ALLOWANCE_S
                process.terminate()
            if kill_at is not None and now >= kill_at:
                process.kill()
            next_deadline = kill_at if kill_at is not None else limit
            self._sleep(_NOTE_S if next_deadline is None else max(0.01, min(_NOTE_S, next_deadline - now)))
            self._clock.note()
        return code

    def _outcome(self, code: int) -> Status:
        failure = self._files.failure()
        attempt = self._files.attempt()
        if self._must_end() and (self._cancelled or code != 0):
            return self._ended("cancelled", exit_code=as_exit_code(code), attempt=attempt)
        if self._timed_out:
            message = f"its time limit of {self._settings['time_limit_s']:g} s was reached"
            return Status(state=State.FAILED, reason=Reason.TIME_LIMIT, exit_code=as_exit_code(code), attempt=attempt,
                          message=message)  # fmt: skip
        if code == 0:
            return Status(state=State.SUCCEEDED, exit_code=0, attempt=attempt)
        if failure is not None and failure["exit_code"] == as_exit_code(code):
            return Status(state=State.FAILED, reason=Reason(failure["reason"]), exit_code=failure["exit_code"],
                          attempt=attempt, message=_message(failure))  # fmt: skip
        message = self._last_log_line() or f"accel launch ended with exit code {code}"
        if code < 0:  # it could report nothing: its log's last line is a rank's
            message = f"accel launch was killed by {signal_name(-code)}"
        return Status(state=State.FAILED, reason=self._refusal(), exit_code=as_exit_code(code), attempt=attempt,
                      message=message.removeprefix("accel launch: "))  # fmt: skip

    def _refusal(self) -> Reason:
        """Return the reason of a failure that blames no rank: the ranks never started, or the rendezvous failed."""
        event = self._files.launch_event("refused")
        if event is not None:
            return Reason(event["reason"])
        return Reason.EXIT_CODE if self._files.launch_event("attempt") else Reason.SETUP

    def _last_log_line(self) -> str:
        return redact(last_line(str(self._files.logs / "node-0.log"), BLOCK), self._secrets)[:_MAX_MESSAGE]

    def _finish(self, status: Status) -> None:
        status = dataclasses.replace(status, observed_at=time.time())
        self._write_result({"schema": SCHEMA, **status.to_json(), "failure": self._files.failure()})
        with contextlib.suppress(StoreError):  # the next poll records it
            self._record.update(status)
        self._slots.dequeue()
        self._slots.release()

    def _write_result(self, document: dict[str, Any]) -> None:
        for _ in range(_WRITE_TRIES):
            try:
                self._result.write_once(document)
                break
            except OSError as error:
                print(f"{self._result.path}: {error.strerror}", file=sys.stderr)
                if not self._files.directory.is_dir():
                    return
                time.sleep(1)
        with contextlib.suppress(OSError):
            atomic_files.sync_directory(str(self._files.directory))
            for name in _REPORTS:  # frees what was reserved
                path = self._files.logs / name
                os.truncate(path, path.stat().st_size)


class _NotLaunched(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status


def _message(failure: dict[str, Any]) -> str:
    subject = f"rank {failure['rank']}" if failure["rank"] is not None else "launcher"
    message = str(failure["message"])
    text = message if message.startswith(subject) else f"{subject}: {message}"
    return f"{text} ({failure['cause']})" if failure["cause"] else text


def main(directory: str) -> NoReturn:
    """Start a supervisor for the job in a forked process and exit; with status 1 if there cannot be one."""
    files = JobFiles(Path(directory))
    ready_fd, notify_fd = os.pipe()
    if os.fork() != 0:
        os.close(notify_fd)
        os._exit(0 if os.read(ready_fd, 1) else 1)
    os.close(ready_fd)
    (files.directory / "local").mkdir(exist_ok=True)
    try:
        lock = lock_soon(f"{files.directory}/local/supervisor.lock")
    except OSError as error:
        problem = f"{files.directory}: its file system has no locks ({error.strerror})"
        print(f"{problem}, which local jobs need. Move ACCEL_HOME", file=sys.stderr, flush=True)
        os._exit(1)
    # A submit that was repeated: the job has its supervisor, or had one.
    if lock is None or files.exit() is not None or files.supervisor() is not None:
        os.write(notify_fd, b"1")
        os._exit(0)
    adopt_orphans()
    try:
        supervisor = Supervisor(files, lock)
        supervisor.register()
    except (SchedulerError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    supervisor.enqueue()
    os.write(notify_fd, b"1")
    os.close(notify_fd)
    supervisor.run()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
