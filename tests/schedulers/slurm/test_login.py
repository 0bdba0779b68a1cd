"""Jobs from a laptop, which has none of Slurm's commands, through the login node."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, State, SubmitError
from schedulers.job import Reason
from schedulers.jobs.attach import find_or_attach
from schedulers.jobs.poll import restore
from schedulers.slurm import watch as watches
from schedulers.store.store import Store
from schedulers.target import SupportsCheck, SupportsClear, SupportsRunning
from tests.clusters.slurm import Slurm
from tests.needs import missing
from tests.waiting import until

from .conftest import Calls, Submit, printed

FromLaptop = Callable[..., Job]
HOSTILE = ("", "a b", "it's", '"', "$(touch x)", "a\nb", "*", "~", "-n", "ü€", ";&|")


@pytest.fixture
def options(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a target says of the login node. This machine does not know the cluster any more."""
    try:
        import fabric  # noqa: F401
    except ImportError:
        missing("fabric", "pip install 'accel-launch[ssh]'")
    monkeypatch.delenv("SLURM_CONF")
    return {"login": "login", "ssh_config": str(slurm.ssh_config), "python": sys.executable, "cpu": True}


@pytest.fixture
def laptop(options: dict[str, Any], submit: Submit) -> Iterator[FromLaptop]:
    jobs: list[Job] = []

    def send(text: str, args: tuple[str, ...] = (), **given: Any) -> Job:
        job = submit(text, args, **{**given, "options": {**options, **given.get("options", {})}})
        jobs.append(job)
        return job

    yield send
    for job in jobs:
        close(job)


def close(job: Job) -> None:
    target: Any = job.waiting_target()
    if target is not None:
        target.close()


def test_a_job_runs_and_tells(laptop: FromLaptop, project: Path, slurm: Slurm, calls: Calls) -> None:
    (project / "show.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    (slurm.home() / "venv").symlink_to(sys.prefix)
    python = {"python": "~/venv/bin/python"}
    job = laptop('python3 show.py "$@"; echo $RANK on $(hostname)', HOSTILE, nodes=2, options=python)
    assert job.wait(120).state is State.SUCCEEDED, printed(job)
    lines = {line.rank: line.text for line in job.logs() if line.rank is not None}
    assert lines == {0: "0 on n1\n", 1: "1 on n2\n"}
    assert json.loads(printed(job).splitlines()[0]) == list(HOSTILE)
    there = slurm.home() / ".accel/jobs" / job.id
    assert (there / "code" / "show.py").exists()
    assert (there / "slurm/settings.json").stat().st_mode & 0o077 == 0
    assert calls.taken() == []  # none here


def test_it_is_followed_and_its_failure_seen(laptop: FromLaptop, slurm: Slurm) -> None:
    """Though start-up files on the login node print."""
    (slurm.home() / ".bashrc").write_text("echo Welcome; echo careful >&2\n")
    job = laptop("for n in 1 2 3; do echo $n; sleep 0.3; done; printf last; exit 7")
    lines: list[str] = []

    def follow() -> None:
        lines.extend(line.text for line in job.logs(follow=True, ranks=[0]))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    status = job.wait(120)
    follower.join(60)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7)
    assert lines == ["1\n", "2\n", "3\n", "last"]


def test_cancelling_what_runs_and_what_waits(laptop: FromLaptop) -> None:
    running = laptop("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    waiting = laptop("echo never", nodes=9)
    until(lambda: "ready\n" in printed(running), "it runs")
    until(
        lambda: "more nodes than its partition allows" in waiting.status(refresh=True).message, "it says why it waits"
    )
    assert waiting.cancel().state is State.CANCELLED
    assert running.cancel().state is State.CANCELLED
    assert "bye\n" in printed(running)


def test_slurm_ends_it_and_the_laptop_is_told(
    laptop: FromLaptop, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that leaves no result; and a conversation that was long enough is followed by the next at once."""
    monkeypatch.setattr(watches, "_LIFETIME_S", 0.5)
    monkeypatch.setattr(watches, "_RETRY_S", 1000.0)
    job = laptop("echo never", nodes=9)
    target: Any = job.waiting_target()
    assert not target.wait(str(job.native_id), 0.1)
    watch = target._cluster._watch
    until(lambda: watch._thread is None, "the first conversation is over")
    slurm.run(["scancel", str(job.native_id).partition("/")[0]])
    until(lambda: target.wait(str(job.native_id), 1), "it is told of the end")
    assert job.wait(120).state is State.CANCELLED


def test_secrets_go_where_they_are_needed(
    laptop: FromLaptop, monkeypatch: pytest.MonkeyPatch, slurm: Slurm, home: Path
) -> None:
    monkeypatch.setenv("MY_TOKEN", "very secret")
    job = laptop("echo $TOKEN", secrets={"TOKEN": "env:MY_TOKEN"})
    assert job.wait(120).state is State.SUCCEEDED
    assert "very secret\n" in printed(job)
    for place in (home, slurm.home() / ".accel"):
        files = [path for path in place.rglob("*") if path.is_file() and "logs" not in path.parts]
        assert not [path for path in files if b"very secret" in path.read_bytes()]


def test_another_machine_finds_it(laptop: FromLaptop, options: dict[str, Any], tmp_path: Path) -> None:
    job = laptop("echo here; exit 3", after=())
    assert job.wait(120).exit_code == 3
    store = Store(tmp_path / "other")
    record, resolved = find_or_attach(job.id, store, "slurm", options)
    assert resolved is not None
    other = Job(record, target=resolved.target)
    assert other.native_id == job.native_id
    assert other.status().exit_code == 3
    assert printed(other) == "here\n"
    with pytest.raises(schedulers.UnknownJob):
        find_or_attach("2mxaaaaaaaa", store, "slurm", options)
    close(other)


def test_what_is_kept_of_jobs_is_cleared(laptop: FromLaptop, slurm: Slurm) -> None:
    over, waiting = laptop("true"), laptop("true", nodes=9)
    assert over.wait(120).state is State.SUCCEEDED
    target = restore(over.record)
    assert isinstance(target, SupportsClear)
    assert isinstance(target, SupportsRunning)
    jobs = {over.id: over.native_id, waiting.id: None, "2mxaaaaaaaa": None}
    assert target.running(jobs) == {waiting.id: "pending in Slurm"}
    del jobs[waiting.id]
    assert target.clear(jobs) == []
    assert [path.name for path in (slurm.home() / ".accel/jobs").iterdir() if path.name in (over.id, waiting.id)] == [
        waiting.id
    ]
    target.close()  # type: ignore[attr-defined]


def test_a_login_node_without_accel(laptop: FromLaptop) -> None:
    with pytest.raises(SubmitError, match="pip install 'accel-launch") as refusal:
        laptop("true", options={"python": "/usr/bin/python3"})
    assert "\n" not in str(refusal.value)
    with pytest.raises(schedulers.SchedulerError) as no_python:
        laptop("true", options={"python": "/nowhere/python"})
    assert "\n" not in str(no_python.value)


def test_a_refusal_is_one_line(laptop: FromLaptop) -> None:
    with pytest.raises(SubmitError, match=r"login: sbatch: .*invalid partition") as refusal:
        laptop("true", options={"partition": "nowhere"})
    assert "\n" not in str(refusal.value)


def test_a_login_node_that_cannot_be_reached(laptop: FromLaptop, slurm: Slurm) -> None:
    job = laptop("echo over")
    assert job.wait(120).state is State.SUCCEEDED
    waiting = laptop("true", nodes=9)
    slurm.link("login", False)
    fresh = schedulers.find(waiting.id)
    assert fresh.status().state is State.QUEUED
    assert "login" in fresh.record.warning
    with pytest.raises(SubmitError, match="nothing was submitted"):
        laptop("true")
    slurm.link("login", True)
    close(fresh)


def test_a_sweep_from_a_laptop(laptop: FromLaptop, options: dict[str, Any], project: Path, home: Path) -> None:
    from schedulers.job import JobSpec, Resources
    from schedulers.sweeps import submit_sweep

    specs = [
        JobSpec(
            argv=("sh", "-c", f"echo {number}"), entry="command", name=f"sweep {number}", procs_per_node=1,
            resources=Resources(cpus=1), grace_s=2.0, code=str(project), options=options,
        )
        for number in range(4)
    ]  # fmt: skip
    jobs = submit_sweep(specs, "slurm")
    assert [str(job.native_id).partition("/")[0].partition("_")[2] for job in jobs] == ["0", "1", "2", "3"]
    for number, job in enumerate(jobs):
        assert job.wait(120).state is State.SUCCEEDED
        assert printed(job) == f"{number}\n"
        close(job)


def test_what_is_wrong_before_any_job(laptop: FromLaptop, options: dict[str, Any]) -> None:
    job = laptop("true")
    target = restore(job.record)
    assert isinstance(target, SupportsCheck)
    checked = target.check()
    assert checked.failures == ()
    assert "main" in [row[0] for row in checked.table]
    close(job)


@pytest.mark.parametrize("login", ["a,b", "gpu[1-2]", "a b", ""])
def test_a_login_node_is_one_host(login: str, submit: Submit) -> None:
    with pytest.raises((schedulers.SpecError, schedulers.ConfigError), match="login"):
        submit("true", options={"login": login})
