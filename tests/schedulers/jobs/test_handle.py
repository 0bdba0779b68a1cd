"""Job and submit, over a target that runs real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import schedulers
from schedulers.errors import ConfigError, SpecError, StoreError, SubmitError, UnknownJob, Unreachable
from schedulers.job import JobSpec, LogLine, Reason, State, Status
from schedulers.jobs.handle import Job, dry_run, find, list_jobs, submit, submit_async, submit_spec
from schedulers.jobs.poll import Answer, apply_poll
from schedulers.local.target import LocalTarget
from schedulers.store import atomic_files
from schedulers.store.store import CorruptRecord, Record, Store
from schedulers.target import Plan

from .test_handle_target import install_shell

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Place:
    """A current directory, a home, and the target kinds `shell` and `waiting`."""

    here: Path
    home: Path
    site: Path

    @property
    def store(self) -> Store:
        return Store(self.home)

    def calls(self) -> list[str]:
        path = self.home / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def sh(self, script: str, target: str = "waiting", **options: object) -> Job:
        return submit("sh", ["-c", script], target=target, entry="command", options=options)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        """What a process of its own does; the jobs that it starts outlive it."""
        path = os.pathsep.join([str(ROOT), str(self.site)])
        return subprocess.run(
            [sys.executable, "-c", f"import schedulers\n{code}"],
            cwd=self.here,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(here=tmp_path / "here", home=tmp_path / "home", site=tmp_path / "site")
    for directory in (place.here, place.home):
        directory.mkdir()
    install_shell(place.site)
    monkeypatch.syspath_prepend(str(place.site))
    monkeypatch.setenv("ACCEL_HOME", str(place.home))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(place.here)
    return place


KINDS = pytest.mark.parametrize("kind", ["shell", "waiting"])


def released(gate: Path) -> str:
    """Shell code that goes on when somebody opens the gate."""
    os.mkfifo(gate)
    return f"read line <{gate}"


def release(gate: Path) -> None:
    gate.write_text("go\n")


def texts(lines: list[LogLine]) -> str:
    return "".join(line.text for line in lines)


@KINDS
def test_a_job_from_submit_to_end(place: Place, kind: str) -> None:
    job = place.sh("echo 0 hello; exit 3", kind)
    status = job.wait(120)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 3)
    assert (job.name, job.target, job.native_id) == ("sh", kind, f"n-{job.id}")
    assert texts(list(job.logs())) == "0 hello\n"
    assert find("@last").record == job.record
    assert next(event.data["status"]["state"] for event in job.record.events()) == "submitting"
    assert place.calls()[0] == f"submit {job.id}"


def test_the_words_of_submit_become_a_spec(place: Place) -> None:
    (place.here / "sub").mkdir()
    (place.here / "sub/train.py").touch()
    first = place.sh("true")
    job = submit(
        Path("train.py"), ["--lr", "1e-3"], target="shell", nodes=2, procs_per_node=3, gpus=1, cpus=2, memory_gb=4,
        env={"A": "b"}, secrets={"T": "env:T"}, code=place.here, cwd="sub", time_limit_s=60, grace_s=5,
        max_restarts=2, after=[first, first.id[:10]], options={"slots": "2"},
    )  # fmt: skip
    assert job.spec.argv == ("train.py", "--lr", "1e-3")
    assert (job.name, job.spec.nodes, job.spec.procs_per_node, job.spec.retry.max_restarts) == ("train", 2, 3, 2)
    assert (job.spec.code, job.spec.workdir) == (str(place.here), "sub")
    assert job.spec.after == (first.id, first.id)
    assert job.record.options() == {"slots": 2}


def test_a_place_outside_the_code_is_refused(place: Place) -> None:
    (place.here / "code").mkdir()
    with pytest.raises(SpecError, match="is not inside the code directory"):
        submit("a.py", target="shell", code="code", cwd=place.here)
    assert list_jobs() == []


def test_what_is_wrong_is_refused_before_anything_is_written(place: Place) -> None:
    with pytest.raises(SpecError):
        submit("a.py", target="shell", nodes=0)
    with pytest.raises(ConfigError):
        submit("a.py", target="shell", options={"slot": 1})
    with pytest.raises(UnknownJob):
        submit("a.py", target="shell", after=["zzz"])
    with pytest.raises(SpecError, match=r"no script at .*/a\.py: it does not exist"):
        submit("a.py", target="shell")
    (place.here / "run.sh").write_text("#!/bin/sh")
    with pytest.raises(SpecError, match=r"run\.sh is a script for /bin/sh"):
        submit("run.sh", target="shell")
    assert list_jobs() == []
    assert place.calls() == []


def test_a_dry_run_does_nothing(place: Place) -> None:
    plan = dry_run(JobSpec(argv=("a",), entry="command"), "shell", "dry")
    assert (plan.job_id, plan.actions) == ("dry", (("a",),))
    assert list_jobs() == []
    assert place.calls() == []


def test_a_refused_job_is_kept_as_failed(place: Place) -> None:
    with pytest.raises(SubmitError, match="the shell is closed today"):
        place.sh("true", refuse=True)
    status = find("@last").wait()
    assert (status.state, status.reason, status.message) == (State.FAILED, Reason.SETUP, "the shell is closed today")
    for follow in (False, True):
        with pytest.raises(SubmitError, match=r"has no logs: failed before .* accepted it: the shell is closed today"):
            list(find("@last").logs(follow=follow))


def test_a_mistake_that_only_the_submit_shows_leaves_no_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalTarget, plan: Plan) -> str:
        raise SpecError("no such queue")

    monkeypatch.setattr(LocalTarget, "submit", refuse)
    (place.here / "a.py").write_text("")
    with pytest.raises(SpecError, match=r"^no such queue$"):
        submit("a.py")
    assert list_jobs() == []


def test_a_target_that_cannot_be_asked_is_asked_again_later(place: Place) -> None:
    (place.home / "unreachable").touch()
    with pytest.raises(Unreachable, match=r"the shell does not answer; job \w+ is kept as submitting"):
        place.sh("true")
    job = find("@last")
    assert job.status().state is State.SUBMITTING  # this process, which submits it, lives
    assert place.calls() == [f"submit {job.id}"]


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_between_intent_and_confirmation_loses_no_job_and_starts_none_twice(place: Place, crash: str) -> None:
    done = place.python(
        "schedulers.submit('sh', ['-c', 'echo 0 once >>ran'], target='waiting', entry='command',"
        f" options={{'crash': {crash!r}}})"
    )
    assert done.returncode == -signal.SIGKILL
    (listed,) = list_jobs()
    assert isinstance(listed, Record)
    assert (listed.status.state, listed.native_id) == (State.SUBMITTING, None)
    assert listed.warning == f"its submit was cut off; `accel status {listed.id}` resumes it"
    assert place.calls() == [f"submit {listed.id}"]
    job = find(listed.id)
    assert job.wait(120).state is State.SUCCEEDED
    assert job.native_id == f"n-{job.id}"
    assert (place.here / "ran").read_text() == "0 once\n"
    assert [call for call in place.calls() if call.startswith("submit")] == [f"submit {job.id}"] * 2


def test_a_submit_that_was_cut_off_and_is_refused_now_has_failed(place: Place) -> None:
    place.python("schedulers.submit('true', target='shell', entry='command', options={'crash': 'before'})")
    job = find("@last")
    target = json.loads((job.record.directory / "target.json").read_text())
    (job.record.directory / "target.json").write_text(json.dumps(target | {"options": {"refuse": True}}))
    assert job.status().state is State.FAILED
    assert job.cancel().state is State.FAILED


def test_while_another_process_submits_nobody_else_does(place: Place) -> None:
    place.python("schedulers.submit('true', target='shell', entry='command', options={'crash': 'before'})")
    job = find("@last")
    with Store(place.home).record(job.id).submission():
        assert job.status().state is State.SUBMITTING
    assert job.status().state is not State.SUBMITTING


def test_a_job_is_found_from_any_directory(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.here / "accel.yaml").write_text("targets: {lab: {kind: waiting, slots: 3}}")
    job = place.sh("true", "lab")
    monkeypatch.chdir(tmp_path)
    (place.here / "accel.yaml").unlink()
    assert find(job.id).wait(120).state is State.SUCCEEDED
    assert find(job.id).describe()["options"] == {"slots": 3}


def test_an_unreachable_target_changes_nothing_and_says_so(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate))
    before = job.status()
    (place.home / "unreachable").touch()
    assert job.status() == before
    assert job.record.warning == "the shell does not answer"
    (listed,) = list_jobs()
    assert isinstance(listed, Record)
    assert (listed.status, listed.warning) == (before, "the shell does not answer")
    with pytest.raises(Unreachable):
        list(job.logs())
    with pytest.raises(Unreachable):
        job.cancel()
    (place.home / "unreachable").unlink()
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED
    assert job.record.warning == ""


def test_a_job_that_the_backend_forgot_is_lost_only_after_a_while(place: Place) -> None:
    job = place.sh("true", "identified")
    (place.home / "forgetful").touch()
    assert job.status().state is State.QUEUED
    assert job.record.warning == "target identified does not know the job"
    (place.home / "forgetful").unlink()
    assert job.record.absent_since is not None
    before_long_ago(job)
    assert job.wait(120).state is State.SUCCEEDED  # it was there all the time


def test_a_job_that_stays_forgotten_is_lost(place: Place) -> None:
    job = place.sh("true", "identified")
    (place.home / "forgetful").touch()
    job.status()
    before_long_ago(job)
    status = job.status()
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)
    assert status.message == "target identified no longer knows the job, and it left no result"


def test_a_job_is_not_lost_within_a_minute_of_its_submit(place: Place) -> None:
    """Backends answer late: however often one does not know a job, that counts a minute after it was first said."""
    record = place.sh("true", "identified").record
    assert record.backend == "shell=one"
    apply_poll(record, Answer(at=time.time(), backend="shell=one"))
    since = record.absent_since
    assert since is not None
    for seconds in (0.0, 1.0, 59.0):
        assert apply_poll(record, Answer(at=since + seconds, backend="shell=one")).state is State.QUEUED
    status = apply_poll(record, Answer(at=since + 61.0, backend="shell=one"))
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)


def test_a_job_that_vanishes_after_its_cancel_is_cancelled(place: Place) -> None:
    job = place.sh("true", "identified")
    (place.home / "forgetful").touch()
    job.status()
    job.record.append("cancel", host="here", pid=1)
    before_long_ago(job)
    status = job.status()
    assert (status.state, status.reason, status.message) == (State.CANCELLED, Reason.USER, "")


@pytest.mark.parametrize(("cancelled", "state"), [(True, State.CANCELLED), (False, State.FAILED)])
def test_a_backend_that_has_lost_a_job_is_asked_no_more(place: Place, cancelled: bool, state: State) -> None:
    job = place.sh("true", "identified")
    if cancelled:  # by another process, after this one has read the record
        find(job.id).record.append("cancel", host="here", pid=1)
    lost = Status(state=State.FAILED, reason=Reason.LOST, message="it was deleted", native_state="Deleted")
    assert apply_poll(job.record, Answer(at=time.time(), status=lost, backend="shell=one")).state is state
    assert job.status(refresh=False).state is state


def test_a_forgotten_job_that_left_a_result_ended_that_way(place: Place) -> None:
    job = place.sh("true")
    (place.home / "forgetful").touch()
    result = {"state": "failed", "reason": "exit_code", "exit_code": 7}
    atomic_files.write_document(f"{job.record.path}/exit.json", result)
    assert job.wait(120).exit_code == 7


def before_long_ago(job: Job, seconds: float = 120) -> None:
    """Move the record two minutes into the past, or `seconds`."""
    path = job.record.directory / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"at": row["at"] - seconds}) + "\n" for row in rows))


def test_a_list_asks_each_target_once(place: Place) -> None:
    (place.here / "accel.yaml").write_text("targets: {one: {kind: waiting}, two: {kind: shell, slots: 2}}")
    gates = [place.here / f"gate-{number}" for number in range(3)]
    one = [place.sh(released(gate), "one") for gate in gates]
    two = [place.sh("true", "two", crash=None) for _ in range(2)]
    over = place.sh("true", "one")
    over.wait(120)
    (place.home / "calls").unlink()
    found = list_jobs()
    assert [job.id for job in found] == [job.id for job in [over, *two[::-1], *one[::-1]]]
    assert sorted(call.split()[0] for call in place.calls()) == ["poll", "poll"]
    assert {frozenset(call.split()[1:]) for call in place.calls()} == {
        frozenset(f"n-{job.id}" for job in one),
        frozenset(f"n-{job.id}" for job in two),
    }
    assert list_jobs(refresh=False)
    assert len(place.calls()) == 2
    for gate, job in zip(gates, one, strict=True):
        release(gate)
        assert job.wait(120).state is State.SUCCEEDED


def test_one_bad_job_does_not_hide_the_others(place: Place) -> None:
    plugged, damaged, fine = place.sh("true"), place.sh("true"), place.sh("true")
    (plugged.record.directory / "target.json").write_text("{")
    (damaged.record.directory / "events.jsonl").write_text("rubbish\n")
    found = {job.id: job for job in list_jobs()}
    assert isinstance(found[damaged.id], CorruptRecord)
    known = found[plugged.id]
    assert isinstance(known, Record)
    assert "target.json is damaged" in known.warning
    assert fine.wait(120).state is State.SUCCEEDED
    with pytest.raises(StoreError):
        damaged.status()


def test_a_wait_that_is_too_short(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate))
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match=f"job {job.id} is not over: it is running"):
            job.wait(timeout)
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED


@KINDS
def test_cancel(place: Place, kind: str) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), kind)
    status = job.cancel()
    assert (status.state, status.reason) == (State.CANCELLED, Reason.USER)
    assert "cancel" in [event.name for event in job.record.events()]
    calls = len(place.calls())
    assert job.cancel() == status  # and asks nobody
    assert len(place.calls()) == calls


def test_cancelling_what_is_over_changes_nothing(place: Place) -> None:
    job = place.sh("exit 4")
    ended = job.wait(120)
    assert job.cancel() == ended


def test_describe_is_plain(place: Place) -> None:
    job = place.sh("true")
    job.wait(120)
    told = json.loads(json.dumps(job.describe()))
    assert (told["id"], told["native_id"], told["status"]["state"]) == (job.id, job.native_id, "succeeded")
    assert told["spec"]["argv"] == ["sh", "-c", "true"]
    assert told["events"][0]["event"] == "submitting"


def test_submit_spec_makes_paths_absolute(place: Place) -> None:
    job = submit_spec(JobSpec(argv=("true",), entry="command"), "shell")
    assert job.spec.code == str(place.here)
    assert job.wait(120).state is State.SUCCEEDED


def test_async(place: Place) -> None:
    async def run() -> None:
        job = await submit_async("sh", ["-c", "echo 0 a; echo 0 b"], target="waiting", entry="command")
        assert [line.text async for line in job.logs_async(follow=True)] == ["0 a\n", "0 b\n"]
        assert (await job.wait_async(120)).state is State.SUCCEEDED
        assert (await job.status_async()).state is State.SUCCEEDED
        assert (await job.cancel_async()).state is State.SUCCEEDED

    asyncio.run(run())


@KINDS
def test_a_cancelled_waiter_leaves_no_thread_and_the_job_alone(place: Place, kind: str) -> None:
    gate = place.here / "gate"
    job = place.sh(f"echo 0 a; {released(gate)}", kind)

    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(job.wait_async(), 0.05)
        lines = job.logs_async(follow=True)
        async for line in lines:
            assert line.text == "0 a\n"
            break
        await lines.aclose()  # type: ignore[attr-defined]  # it is an async generator

    asyncio.run(run())  # ends only when its threads have ended
    assert not job.status().state.final
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED


def test_the_package_exports_what_it_says() -> None:
    assert all(getattr(schedulers, name) is not None for name in schedulers.__all__)
    assert set(schedulers.__all__) <= set(dir(schedulers))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        schedulers.nothing  # noqa: B018


def test_listing_imports_no_heavy_module(place: Place) -> None:
    heavy = (
        "msgspec yaml platformdirs pathspec asyncio subprocess pathlib tarfile hashlib importlib.metadata torch accel"
    )
    done = place.python(
        f"import sys; schedulers.list_jobs(); print([name for name in {heavy.split()} if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr
