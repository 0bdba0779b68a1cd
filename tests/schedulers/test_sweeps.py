"""Sweeps: what the points are, what becomes of the arguments, and many jobs in one request."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedulers import JobSpec, SpecError, Store, sweeps
from schedulers.errors import SchedulerError

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
        ("a.csv", "lr,lr\n1,2\n", "a.csv:1: a column has the name of another"),
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
    with pytest.raises(SpecError, match="1,000,000 jobs; 10,000 are the most"):
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
