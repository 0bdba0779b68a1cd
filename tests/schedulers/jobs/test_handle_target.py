"""A small target that runs real processes, and that can be made to refuse, forget, vanish and crash.

It is the reference for what `Target` asks of a target, so it is tested itself; the tests of `Job` stand on it.

In the store's home, the file `unreachable` makes it unreachable, `expired` its credentials invalid, and `forgetful`
makes it know no job. `calls` has a line for each call that it got; with `stubborn`, its jobs survive a cancel.
`backend` has the identity that an `identified` one tells (`shell=one` without it).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from schedulers.errors import CredentialsExpired, SchedulerError, SubmitError, Unreachable
from schedulers.job import Cursor, JobSpec, LogLine, Reason, State, Status
from schedulers.target import DiscoveredJob, Plan, SupportsWait, TargetContext, load_kind

from ..test_target import install

# Runs the command, tells its result whole, and then closes the pipe that waiters listen to.
RUNNER = 'd=$1; shift; "$@" >"$d/out" 2>&1; c=$?; echo $c >"$d/code.tmp"; mv "$d/code.tmp" "$d/code"'


@dataclass(frozen=True, kw_only=True)
class ShellOptions:
    """crash: dies, once, just before or just after it has started the job; hang: waits there for a writer of the fifo
    `hang` in the store's home; refuse: refuses every job; part: refuses one that it has started; whole: a job that is
    found lacks nothing."""

    crash: Literal["before", "after"] | None = None
    hang: Literal["before", "after"] | None = None
    refuse: bool = False
    part: bool = False
    whole: bool = True
    slots: int = 1


class ShellTarget:
    """Runs argv as it is. The native id is `n-` and the job id."""

    Options: ClassVar[type] = ShellOptions

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._options: ShellOptions = context.options
        self._jobs = context.jobs
        self._home = context.jobs.parent

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        return Plan(target=self.name, kind="shell", job_id=job_id, actions=(spec.argv,), settings={"code": spec.code})

    def submit(self, plan: Plan) -> str:
        self._called("submit", plan.job_id)
        if self._options.refuse:
            raise SubmitError("the shell is closed today")
        directory = self._directory(f"n-{plan.job_id}")
        if not (directory / "pid").exists():
            self._crash("before", plan.job_id)
            directory.mkdir(exist_ok=True)
            os.mkfifo(directory / "end")
            # Open for writing as long as the job lives: a reader is told of its end by the kernel.
            end = os.open(directory / "end", os.O_RDWR)
            process = subprocess.Popen(
                ["sh", "-c", RUNNER, "sh", str(directory), *plan.actions[0]],
                stdin=subprocess.DEVNULL,
                stdout=end,
                stderr=subprocess.DEVNULL,
                cwd=plan.settings["code"],
                start_new_session=True,
            )
            os.close(end)
            process.returncode = 0  # the job is nobody's child: it is not to be warned about
            (directory / "pid").write_text(str(process.pid))
            self._crash("after", plan.job_id)
        if self._options.part:
            error = SubmitError("a part of it is refused")
            error.native_id = f"n-{plan.job_id}"
            raise error
        return f"n-{plan.job_id}"

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        self._called("poll", *native_ids)
        if (self._home / "forgetful").exists():
            return {}
        return {native_id: self._status(self._directory(native_id)) for native_id in native_ids}

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        self._called("logs", native_id)
        directory = self._directory(native_id)
        complete = self._status(directory).state.final
        offset = int((since.position("out") if since else None) or 0)
        if not (directory / "out").exists():  # the shell has not come to it yet
            return
        with open(directory / "out", "rb") as file:
            file.seek(offset)
            for line in file.read().splitlines(keepends=True):
                if not (complete or line.endswith(b"\n")):
                    return
                offset += len(line)
                text = line.decode("utf-8", "surrogateescape")
                rank = int(text[0]) if text[:1].isdigit() else None
                yield LogLine(rank=rank, text=text, source="out", position=str(offset))

    def cancel(self, native_id: str) -> None:
        self._called("cancel", native_id)
        directory = self._directory(native_id)
        if not (directory / "code").exists() and not (self._home / "stubborn").exists():
            (directory / "cancelled").touch()
            os.killpg(int((directory / "pid").read_text()), signal.SIGKILL)

    def _directory(self, native_id: str) -> Path:
        return self._jobs / native_id.removeprefix("n-") / "shell"

    def _status(self, directory: Path) -> Status:
        if (directory / "cancelled").exists():
            return Status(state=State.CANCELLED, reason=Reason.USER)
        if not (directory / "code").exists():
            return Status(state=State.RUNNING)
        code = int((directory / "code").read_text())
        if code:
            return Status(state=State.FAILED, reason=Reason.EXIT_CODE, exit_code=code)
        return Status(state=State.SUCCEEDED, exit_code=0)

    def _crash(self, when: str, job_id: str) -> None:
        crashed = self._home / f"crashed-{job_id}"
        if self._options.crash == when and not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.hang == when:
            (self._home / "hangs").touch()
            os.close(os.open(self._home / "hang", os.O_RDONLY))

    def _called(self, *words: str) -> None:
        with open(self._home / "calls", "a") as file:
            file.write(" ".join(words) + "\n")
        if (self._home / "unreachable").exists():
            raise Unreachable("the shell does not answer")
        if (self._home / "expired").exists():
            raise CredentialsExpired("the login has expired: sign in again")


class WaitingShellTarget(ShellTarget):
    """The same, told by the kernel when a job ends."""

    def wait(self, native_id: str, timeout_s: float) -> None:
        import select

        end = os.open(self._directory(native_id) / "end", os.O_RDONLY | os.O_NONBLOCK)
        try:
            poller = select.poll()
            poller.register(end, select.POLLHUP)
            poller.poll(timeout_s * 1000)
        finally:
            os.close(end)


class FindingShellTarget(WaitingShellTarget):
    """The same, found by the job's id."""

    def find(self, job_id: str) -> DiscoveredJob | None:
        self._called("find", job_id)
        if not (self._directory(job_id) / "pid").exists():
            return None
        plan = Plan(target=self.name, kind="finding", job_id=job_id)
        spec = JobSpec(argv=("sh",))
        return DiscoveredJob(native_id=f"n-{job_id}", spec=spec, plan=plan, whole=self._options.whole)


class IdentifiedShellTarget(FindingShellTarget):
    """The same, with a backend that can be told from others."""

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        self._called("backends", *jobs)
        path = self._home / "backend"
        return dict.fromkeys(jobs, path.read_text() if path.exists() else "shell=one")

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        self._called("running", *jobs)
        statuses = {job_id: self._status(self._directory(job_id)) for job_id in jobs}
        return {job_id: "in the shell" for job_id, status in statuses.items() if not status.state.final}


def install_shell(site: Path) -> None:
    """Adds the kinds `shell`, `waiting`, `finding` and `identified` for every process with `site` in its path."""
    classes = {
        "shell": "ShellTarget", "waiting": "WaitingShellTarget", "finding": "FindingShellTarget",
        "identified": "IdentifiedShellTarget",
    }  # fmt: skip
    install(site, *(f"{kind} = {__name__}:{name}" for kind, name in classes.items()))


def test_the_kinds_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_shell(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    context = TargetContext(name="s", options=ShellOptions(), jobs=tmp_path)
    assert not isinstance(load_kind("shell")(context), SupportsWait)
    assert isinstance(load_kind("waiting")(context), SupportsWait)


def test_a_submit_that_is_repeated_starts_nothing(tmp_path: Path) -> None:
    target = WaitingShellTarget(TargetContext(name="s", options=ShellOptions(), jobs=tmp_path / "jobs"))
    (tmp_path / "jobs/j").mkdir(parents=True)
    plan = target.plan(JobSpec(argv=("sh", "-c", "echo 0 run >>ran"), code=str(tmp_path)), "j")
    assert [target.submit(plan) for _ in range(3)] == ["n-j"] * 3
    while not target.poll(["n-j"])["n-j"].state.final:
        target.wait("n-j", 60)
    assert (tmp_path / "ran").read_text() == "0 run\n"
    assert target.poll(["n-j"])["n-j"].state is State.SUCCEEDED
