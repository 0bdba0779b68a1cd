"""Sweeps: what the points are, what becomes of the arguments, and many jobs in one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from accel.cli import exit_status, main
from schedulers import Job, JobSpec, Reason, SpecError, State, Status, Store, sweeps
from schedulers.errors import SchedulerError, StoreError, SubmitError, Unreachable
from schedulers.jobs.submit import for_each, send
from schedulers.store.record import Record
from schedulers.target import Plan, SupportsSubmitMany

_BASE = JobSpec(argv=("train.py", "--out", "runs/{lr}-{seed}", "{"), name="train")


def test_a_grid_is_every_combination_in_order() -> None:
    points = sweeps.grid({"lr": ["1e-3", "1e-4"], "seed": ["1", "2"]})
    assert points == [
        {"lr": "1e-3", "seed": "1"},
        {"lr": "1e-3", "seed": "2"},
        {"lr": "1e-4", "seed": "1"},
        {"lr": "1e-4", "seed": "2"},
    ]


def test_arguments_hold_the_values_or_get_them_appended() -> None:
    (job,) = sweeps.specs(_BASE, [{"lr": "1e-3", "seed": "{lr}", "note": "it's $HOME"}])
    assert job.argv == ("train.py", "--out", "runs/1e-3-{lr}", "{", "--note", "it's $HOME")
    assert job.name == "train [lr=1e-3, seed={lr}, note=it's $HOME]"


def test_names_stay_short_and_printable() -> None:
    (job,) = sweeps.specs(_BASE, [{"text": "a\n" + "x" * 200}])
    assert len(job.name) == 80
    assert job.name.isprintable()
    assert job.argv[-1] == "a\n" + "x" * 200


@pytest.mark.parametrize(
    ("name", "text", "points"),
    [
        ("a.csv", 'lr,note\n1e-3,"a, b"\n1e-4,\n', [{"lr": "1e-3", "note": "a, b"}, {"lr": "1e-4", "note": ""}]),
        ("a.tsv", "lr\tseed\n1\t2\n", [{"lr": "1", "seed": "2"}]),
        ("a.yaml", "- {lr: 1e-3, flag: no}\n- {lr: 0x10}\n", [{"lr": "1e-3", "flag": "no"}, {"lr": "0x10"}]),
        ("a.yaml", "lr: [1e-3, 1e-4]\nseed: [1]\n", [{"lr": "1e-3", "seed": "1"}, {"lr": "1e-4", "seed": "1"}]),
        ("a.json", '[{"lr": 0.10}]', [{"lr": "0.10"}]),
    ],
)
def test_a_table(tmp_path: Path, name: str, text: str, points: list[dict[str, str]]) -> None:
    (tmp_path / name).write_text(text)
    assert sweeps.read(tmp_path / name) == points


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "lr,seed\n1\n", "a.csv:2: 1 values for 2 columns"),
        ("a.csv", "lr,lr\n1,2\n", "a.csv:1: two columns have the same name"),
        ("a.csv", "lr\n", "it has no points"),
        ("a.yaml", "lr: 3\n", "lr: expects a list of values"),
        ("a.yaml", "- lr: [1]\n", "lr: expects a plain value, not ['1']"),
        ("a.yaml", "- 3\n", "expects a list of mappings"),
        ("a.yaml", "a: [1\n", "a.yaml:2: "),
        ("a.yaml", "lr: []\n", "lr has no values"),
    ],
)
def test_a_table_that_cannot_be_meant(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        sweeps.read(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_table_and_too_many_jobs(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        sweeps.read(tmp_path / "none.csv")
    with pytest.raises(SpecError, match="1,000,000 jobs, but at most 10,000"):
        sweeps.grid({"a": ["1"] * 1000, "b": ["2"] * 1000})
    with pytest.raises(SpecError, match="write it without dashes"):
        sweeps.specs(_BASE, [{"--lr": "1"}])


def test_a_job_for_each_point(tmp_path: Path) -> None:
    """A target that takes one job at a time gets one after another."""
    store = Store(tmp_path / "home")
    (tmp_path / "a.py").write_text("import sys; print(sys.argv[1:])")
    base = JobSpec(argv=("a.py",), code=str(tmp_path))
    jobs = sweeps.submit_sweep(sweeps.specs(base, sweeps.grid({"n": ["1", "2"]})), "local", store, start=tmp_path)
    assert [job.wait(timeout=120).exit_code for job in jobs] == [0, 0]
    assert ["".join(line.text for line in job.logs(ranks=[0])) for job in jobs] == [
        "['--n', '1']\n",
        "['--n', '2']\n",
    ]


def test_a_refusal_says_how_many_went_before(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    (tmp_path / "a.py").write_text("")
    good = JobSpec(argv=("a.py",), code=str(tmp_path))
    bad = JobSpec(argv=("a.py",), code=str(tmp_path), nodes=2)
    with pytest.raises(SchedulerError, match=r"one machine.*\(1 of 2 jobs were submitted before\)"):
        sweeps.submit_sweep([good, bad], "local", store, start=tmp_path)
    (only,) = store.ids()
    from schedulers import find

    assert find(only, store).wait(timeout=120).exit_code == 0


class AtOnce:
    """A target that takes a sweep in one request, and looks at what is on the disk by then."""

    def __init__(self, home: Path, refusal: SchedulerError | None = None) -> None:
        self.home, self.refusal = home, refusal
        self.seen: dict[str, State] = {}

    def submit_many(self, plans: Sequence[Plan]) -> list[str]:
        for job_id in Store(self.home).ids():
            self.seen[job_id] = Store(self.home).record(job_id).status.state
        if self.refusal is not None:
            raise self.refusal
        return [f"native-{number}" for number in range(len(plans))]


def send_all(records: Sequence[Record], target: object, plans: Sequence[Plan]) -> None:
    send(records, cast(SupportsSubmitMany, target), lambda: cast(SupportsSubmitMany, target).submit_many(plans))


def kept(store: Store, count: int) -> tuple[list[Record], list[Plan]]:
    from schedulers.config.named_targets import resolve_target

    target = resolve_target("local", store.jobs).target
    spec = JobSpec(argv=("true",), entry="command")
    plans = [target.plan(spec, store.new_id()) for _ in range(count)]
    ids = [plan.job_id for plan in plans]
    records = for_each(
        lambda pair: store.create(pair[0], spec, pair[1], target="t", kind="local"), zip(ids, plans, strict=True)
    )
    assert [record.id for record in records] == ids
    return records, plans


def test_every_intent_is_on_the_disk_before_the_target_is_asked(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    records, plans = kept(store, 100)
    target = AtOnce(store.home)
    send_all(records, target, plans)
    assert target.seen == {record.id: State.SUBMITTING for record in records}
    again = [Store(store.home).record(record.id) for record in records]
    assert [record.native_id for record in again] == [f"native-{number}" for number in range(100)]
    assert {record.status.state for record in again} == {State.QUEUED}


class InPart:
    """A target that refuses some of the jobs: one after a part of it was started, one in silence."""

    def __init__(self, home: Path, *, silent: bool) -> None:
        self.home, self.silent = home, silent
        self.cancelled: list[str] = []

    def submit_many(self, plans: Sequence[Plan]) -> list[str | SchedulerError]:
        refusal = SubmitError("h2 refuses")
        refusal.native_id = "h1,h2/part"
        return ["n-0", refusal, SubmitError("h3 refuses"), Unreachable("h4 is silent"), "n-4"]

    def cancel(self, native_id: str) -> None:
        ids = [Store(self.home).record(job_id).native_id for job_id in Store(self.home).ids()]
        assert {"n-0", "h1,h2/part", "n-4"} <= set(ids)  # recorded before any cancel
        self.cancelled.append(native_id)
        if self.silent:
            raise Unreachable("h1 is silent")

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """The part that had started has ended."""
        return dict.fromkeys(native_ids, Status(state=State.CANCELLED, reason=Reason.USER))


@pytest.mark.parametrize("silent", [False, True])
def test_a_part_of_a_sweep_that_is_refused_leaves_the_other_jobs_alone(tmp_path: Path, silent: bool) -> None:
    store = Store(tmp_path / "home")
    records, plans = kept(store, 5)
    target = InPart(store.home, silent=silent)
    send_all(records, target, plans)
    again = [Store(store.home).record(record.id) for record in records]
    part = State.QUEUED if silent else State.FAILED
    states = [State.QUEUED, part, State.FAILED, State.SUBMITTING, State.QUEUED]
    assert [record.status.state for record in again] == states
    assert [record.native_id for record in again] == ["n-0", "h1,h2/part", None, None, "n-4"]
    assert [record.incomplete for record in again] == [False, silent, True, True, False]
    assert again[1].cancel_requested  # who asks next repeats it
    assert target.cancelled == ["h1,h2/part"]
    why = "h2 refuses; h1,h2/part may still run: h1 is silent" if silent else "h2 refuses"
    assert [record.warning for record in records] == ["", why, "h3 refuses", "h4 is silent", ""]


def test_the_command_names_the_jobs_that_were_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "home")
    records, plans = kept(store, 5)
    send_all(records, InPart(store.home, silent=False), plans)
    monkeypatch.setattr(sweeps, "submit_sweep", lambda *_: [Job(record) for record in records])
    assert main(["submit", "--sweep", "n=1,2", "--no-python", "true"]) == exit_status.ERROR
    out, err = capsys.readouterr()
    assert out.split() == [record.id for record in records]
    assert f"accel: job {records[2].id}: h3 refuses\n" in err
    assert "2 of 5 jobs submitted" in err


def test_a_refusal_is_recorded_with_each_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    records, plans = kept(store, 20)
    with pytest.raises(SpecError, match="no such partition"):
        send_all(records, AtOnce(store.home, SpecError("no such partition")), plans)
    again = [Store(store.home).record(record.id).status for record in records]
    assert {(status.state, status.message) for status in again} == {(State.FAILED, "no such partition")}


def test_nothing_is_asked_of_the_target_when_an_intent_cannot_be_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    records, _ = kept(store, 1)
    with pytest.raises(StoreError, match="exists already"):
        for_each(
            lambda job_id: store.create(job_id, records[0].spec(), records[0].plan(), target="t", kind="local"),
            [records[0].id] * 3,
        )


def test_a_caller_may_choose_the_ids(tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    ids = [store.new_id() for _ in range(2)]
    jobs = [JobSpec(argv=("true",), entry="command")] * 2
    submitted = sweeps.submit_sweep(jobs, "local", store, start=tmp_path, ids=ids)
    assert [job.id for job in submitted] == ids
    with pytest.raises(StoreError, match=f"job {ids[0]} exists already"):
        sweeps.submit_sweep(jobs, "local", store, start=tmp_path, ids=ids)
    assert [job.wait(60).state for job in submitted] == [State.SUCCEEDED] * 2
