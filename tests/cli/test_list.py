"""`accel list`: what it reads and polls for the jobs that it shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accel.cli import exit_status, main
from schedulers import target
from schedulers.errors import Unreachable
from schedulers.job import JobSpec, State, Status
from schedulers.store import atomic_files
from schedulers.store.store import Record, Store
from schedulers.target import JobSummary, Plan, TargetContext

List = Callable[..., dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return Store.default()


@pytest.fixture
def listed(store: Store, capsys: pytest.CaptureFixture[str]) -> List:
    def listed(*argv: str) -> dict[str, Any]:
        assert main(["list", "--json", *argv]) == exit_status.OK
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return listed


def running(store: Store) -> Record:
    """A job of the local target that has no supervisor: a poll does not know it, and notes that in its record."""
    job_id = store.new_id()
    plan = Plan(target="local", kind="local", job_id=job_id)
    record = store.create(job_id, JobSpec(argv=("a.py",)), plan, target="local", kind="local", options={})
    record.update(Status(state=State.RUNNING, observed_at=1.0), job_id)
    return record


def polled(store: Store) -> set[str]:
    records = [record for record in store.records() if isinstance(record, Record)]
    return {record.id for record in records if record.absent_since is not None}


def test_only_the_shown_jobs_are_read_and_polled(store: Store, listed: List, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [running(store).id for _ in range(7)][::-1]
    read: set[str] = set()
    read_bytes = atomic_files.read_bytes

    def noting(path: str) -> bytes | None:
        read.add(Path(path).parent.name)
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "read_bytes", noting)
        found = listed("--limit", "2")
    assert ([job["id"] for job in found["jobs"]], found["older"]) == (ids[:2], 5)
    assert read == polled(store) == set(ids[:2])
    assert listed("--limit", "0") == {"jobs": [], "older": 7}
    assert polled(store) == set(ids[:2])
    assert [job["id"] for job in listed("--all")["jobs"]] == ids
    assert polled(store) == set(ids)


def test_a_filter_counts_the_jobs_that_it_lets_pass(store: Store, listed: List) -> None:
    ids = [running(store).id for _ in range(4)][::-1]
    store.record(ids[1]).update(Status(state=State.SUCCEEDED, exit_code=0))
    found = listed("--state", "running", "--limit", "2")
    assert ([job["id"] for job in found["jobs"]], found["older"]) == ([ids[0], ids[2]], 1)


def test_a_damaged_job_is_one_of_those_shown(store: Store, listed: List) -> None:
    ids = [running(store).id for _ in range(3)][::-1]
    (store.jobs / ids[0] / "events.jsonl").write_text("rubbish\n")
    found = listed("--limit", "1")
    assert ([job["state"] for job in found["jobs"]], found["older"]) == (["damaged"], 2)


class Shared:
    """A target that other machines submit jobs to; `jobs` are those that it lists, all of them running."""

    jobs: ClassVar[list[JobSummary]] = []
    silent: ClassVar[bool] = False

    @dataclasses.dataclass(frozen=True)
    class Options:
        queue: str = "main"

    def __init__(self, context: TargetContext) -> None:
        self.name = context.name
        self._queue: str = context.options.queue

    def listed(self) -> list[JobSummary]:
        if self.silent:
            raise Unreachable("target shared: no answer")
        return [job for job in self.jobs if job.native_id.startswith(f"{self._queue}/")]

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        return {native_id: Status(state=State.RUNNING) for native_id in native_ids if "gone" not in native_id}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "jobs", [])
    monkeypatch.setattr(Shared, "silent", False)
    monkeypatch.setattr(target, "BUILT_IN", {**target.BUILT_IN, "shared": f"{__name__}:Shared"})
    monkeypatch.setattr("schedulers.config.named_targets.BUILT_IN", target.BUILT_IN)


def there(job_id: str, at: float, queue: str = "main") -> JobSummary:
    return JobSummary(job_id=job_id, native_id=f"{queue}/{job_id}", name="far", nodes=2, created_at=at)


@pytest.mark.usefixtures("shared")
def test_a_target_is_asked_for_jobs_that_are_not_known_here(
    store: Store, listed: List, capsys: pytest.CaptureFixture[str]
) -> None:
    known = store.new_id()
    plan = Plan(target="shared", kind="shared", job_id=known)
    spec = JobSpec(argv=("a.py",), name="near")
    record = store.create(known, spec, plan, target="shared", kind="shared", options={})
    record.update(Status(state=State.RUNNING), f"main/{known}")
    at = record.created_at
    Shared.jobs = [
        there(known, at),
        there("0aaaaaaaaaa", at + 9),
        there("2mxaaaaaaaa", at - 9),
        there("gone0000000", at),
    ]
    found = listed("--target", "shared")
    assert [(job["id"], job["name"], job["state"], job["nodes"]) for job in found["jobs"]] == [
        ("0aaaaaaaaaa", "far", "running", 2), (known, "near", "running", 1), ("2mxaaaaaaaa", "far", "running", 2)
    ]  # fmt: skip
    assert store.ids() == [known]
    assert [job["id"] for job in listed()["jobs"]] == [known]
    assert listed("--target", "shared", "--state", "failed") == {"jobs": [], "older": 0}
    limited = listed("--target", "shared", "--limit", "1")
    assert ([job["id"] for job in limited["jobs"]], limited["older"]) == (["0aaaaaaaaaa"], 2)

    assert main(["list", "--target", "shared"]) == exit_status.OK
    assert "2 jobs are not recorded here; record one: accel status JOB --target shared" in capsys.readouterr().err
    Shared.jobs = [there("2mxaaaaaaaa", at, queue="other")]
    assert len(listed("--target", "shared", "--option", "queue=other")["jobs"]) == 2


@pytest.mark.usefixtures("shared")
def test_a_target_is_asked_for_a_job_that_has_taken_the_place_of_one_that_ended(store: Store, listed: List) -> None:
    """As `helm install` makes it under the same id after `helm uninstall`."""
    spec, plan = JobSpec(argv=("a.py",), name="near"), Plan(target="shared", kind="shared", job_id="0aaaaaaaaaa")
    more: dict[str, Any] = {"target": "shared", "kind": "shared", "native_id": "main/u-1", "made_at": 1e9}
    record = store.create(plan.job_id, spec, plan, **more)
    record.update(Status(state=State.SUCCEEDED))
    later = JobSummary(job_id=plan.job_id, native_id="main/u-2", name="far", nodes=2, created_at=1e9 + 60)
    for other, name in ((later, "far"), (dataclasses.replace(later, native_id="main/u-1"), "near"),
                        (dataclasses.replace(later, created_at=1e9), "near")):  # fmt: skip
        Shared.jobs = [other]
        assert [job["name"] for job in listed("--target", "shared")["jobs"]] == [name]
    assert [job["state"] for job in listed()["jobs"]] == ["succeeded"]  # a target that nobody names is not asked


@pytest.mark.usefixtures("shared")
def test_a_target_that_cannot_be_asked_hides_no_job_that_is_known_here(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    known = running(store).id
    Shared.silent = True
    plan = Plan(target="gone", kind="shared", job_id=store.new_id())
    store.create(plan.job_id, JobSpec(argv=("a.py",)), plan, target="gone", kind="shared", options={})
    for name, why in (("shared", "target shared: no answer"), ("gone", "no target or kind 'gone'")):
        assert main(["list", "--target", name]) == exit_status.OK
        assert f"accel: warning: jobs of other machines are not listed: {why}" in capsys.readouterr().err
        assert main(["list", "--target", name, "--state", "failed"]) == exit_status.OK  # of which there is none
        capsys.readouterr()
    assert main(["list", "--target", "local"]) == exit_status.OK
    shown = capsys.readouterr()
    assert (shown.out.split()[0], "left out" in shown.err) == (known, False)
    assert main(["list", "--option", "queue=other"]) == exit_status.USAGE
    assert capsys.readouterr().err == "accel list: --option needs --target NAME\n"


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--target", "nosuch"], "no target or kind 'nosuch'"),
        (["--target", "nosuch", "--state", "failed"], "no target or kind 'nosuch'"),
        (["--target", "shared", "--option", "bogus=1"], "--option bogus: the shared target has no such option"),
        (["--target", "local", "--option", "bogus=1"], "--option bogus: the local target has no such option"),
    ],
)
def test_a_wrong_target_or_option_is_a_mistake(
    store: Store, capsys: pytest.CaptureFixture[str], argv: list[str], error: str
) -> None:
    running(store)
    assert main(["list", *argv]) == exit_status.USAGE
    assert capsys.readouterr().err.startswith(f"accel list: {error}")
