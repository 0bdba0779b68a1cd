"""The tracker without a dependency: exact, whole lines, readable at any time, joined again after a restart."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel import Accelerator
from accel.errors import ArgumentError, TrackerError
from accel.tracking import JSONLTracker, read_history, read_records
from tests.needs import package

from ..worlds import clean_env, run, run_one

package("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def open_tracker(directory: Path, **how: Any) -> JSONLTracker:
    tracker = JSONLTracker("run", directory, **how)
    tracker.start()
    return tracker


def logged(path: Path) -> list[tuple[int | None, dict[str, Any]]]:
    return [(r["step"], r["values"]) for r in read_records(path) if r["kind"] == "log"]


def by_accelerator(directory: str) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=directory)
    accelerator.init_trackers("digits", {"lr": 0.1, "sizes": (3, 4), "path": Path("data"), "none": None})
    for step in range(3):
        accelerator.log({"loss": torch.tensor(1 / (step + 1), dtype=torch.float64)}, step=step)
    accelerator.log({"note": "ended"})
    accelerator.end_training()


def test_one_line_a_record_on_the_main_process_alone(tmp_path: Path) -> None:
    run(by_accelerator, str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "digits").iterdir()) == ["metrics.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "digits/metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "config", "log", "log", "log", "log", "end"]
    assert len({line["run"] for line in lines}) == 1
    assert (lines[0]["processes"], lines[0]["rank"], lines[0]["schema"]) == (2, 0, 1)
    assert lines[1]["config"] == {"lr": 0.1, "sizes": [3, 4], "path": "data", "none": None}
    assert [(line["step"], line["values"]) for line in lines[2:6]] == [
        (0, {"loss": 1.0}),
        (1, {"loss": 0.5}),
        (2, {"loss": 1 / 3}),
        (None, {"note": "ended"}),
    ]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def on_every_rank(directory: str) -> int:
    accelerator = Accelerator(log_with="jsonl", project_dir=directory)
    accelerator.init_trackers("digits", init_kwargs={"jsonl": {"every_rank": True}})
    accelerator.log({"rank": accelerator.process_index}, step=0)
    accelerator.end_training()
    return len(accelerator.trackers)


def test_every_rank_has_its_own_file(tmp_path: Path) -> None:
    assert run(on_every_rank, str(tmp_path)) == [1, 1]
    assert logged(tmp_path / "digits/metrics.jsonl") == [(0, {"rank": 0})]
    assert logged(tmp_path / "digits/metrics.1.jsonl") == [(0, {"rank": 1})]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@given(values=st.dictionaries(st.text(), VALUES, max_size=4))
@settings(deadline=None)
def test_values_come_back_exactly(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    tracker = open_tracker(tmp_path_factory.mktemp("exact"))
    tracker.log(values, step=1)
    (record,) = [r for r in read_records(tracker.tracker) if r["kind"] == "log"]
    assert same(record["values"], values)
    for line in tracker.tracker.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    tracker.finish()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(3), 3),
        (torch.tensor([0.1], dtype=torch.float32), float(np.float32(0.1))),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(True), True),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.empty(0), []),
        (np.float16(0.5), 0.5),
        (np.int64(2**60), 2**60),
        (np.float64(0.1), 0.1),
        (np.array([1.0, math.inf]), [1.0, math.inf]),
        ({"a": torch.tensor(1), "b": {"c": np.int8(2)}}, {"a": 1, "b": {"c": 2}}),
        (2**70, 2**70),
    ],
)
def test_tensors_and_arrays_become_numbers(value: Any, expected: Any, tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path)
    tracker.log({"x": value}, step=torch.tensor(4))  # type: ignore[arg-type]
    ((step, values),) = logged(tracker.tracker)
    assert step == 4
    assert same(values["x"], expected)
    tracker.finish()


def test_no_line_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from accel.tracking import JSONLTracker\n"
        "tracker = JSONLTracker('run', sys.argv[1], run_id='one')\n"
        "tracker.start()\n"
        "for step in range(200): tracker.log({'loss': step / 7}, step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=clean_env(), timeout=240)
    assert ended.returncode == -signal.SIGKILL
    path = tmp_path / "run/metrics.jsonl"
    assert logged(path) == [(step, {"loss": step / 7}) for step in range(200)]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_cut_short_costs_itself_alone(cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_tracker(tmp_path, run_id="one")
    first.log({"loss": 1.0}, step=0)
    path = first.tracker
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:-cut])
    assert logged(path) == [(0, {"loss": 1.0})], "a line that is being written is not read"
    again = open_tracker(tmp_path, run_id="one")
    again.log({"loss": 2.0}, step=1)
    assert path.read_bytes().startswith(whole)
    # Cut by its newline alone, the line is whole all the same.
    assert logged(path) == [(0, {"loss": 1.0})] * (2 if cut == 1 else 1) + [(1, {"loss": 2.0})]
    assert ("skipped line 3, which is damaged" in caplog.text) == (cut != 1)


def test_a_run_that_begins_again_replaces_what_it_repeats(tmp_path: Path) -> None:
    for steps in (range(6), range(4, 8)):
        tracker = open_tracker(tmp_path, run_id="job")
        for step in steps:
            tracker.log({"loss": float(steps.start * 100 + step)}, step=step)
        tracker.log({"note": "evaluated"})
    other = open_tracker(tmp_path, run_id="other")
    other.log({"loss": 9.0}, step=0)
    history = read_history(tracker.tracker, run="job")
    assert [(r["step"], r["values"]["loss"]) for r in history if r["step"] is not None] == [
        *((step, float(step)) for step in range(4)),
        *((step, float(400 + step)) for step in range(4, 8)),
    ]
    assert sum(r["step"] is None for r in history) == 2
    assert [r["values"] for r in read_history(tracker.tracker)] == [{"loss": 9.0}], "without a name, the last run begun"


def job_id_of_run(directory: str) -> str:
    tracker = JSONLTracker("run", directory)
    return tracker.run_id


def test_the_attempts_of_a_job_are_one_run(tmp_path: Path) -> None:
    env = {"ACCEL_JOB_ID": "train-3f2a", "ACCEL_ATTEMPT": "2"}
    run_one(by_accelerator, str(tmp_path), env=env)
    (start,) = [r for r in read_records(tmp_path / "digits/metrics.jsonl") if r["kind"] == "start"]
    assert (start["run"], start["attempt"]) == ("train-3f2a", 2)
    assert run_one(job_id_of_run, str(tmp_path)) != run_one(job_id_of_run, str(tmp_path))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond ``room`` bytes: a write gets through in part, as on a disk that fills up, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_the_disk(directory: str) -> list[str]:
    import logging

    from accel.tracking import isolation

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel.tracking").addHandler(handler)
    isolation.FIRST_PAUSE_S = 600.0
    accelerator = Accelerator(log_with="jsonl", project_dir=directory)
    accelerator.init_trackers("digits")
    accelerator.log({"loss": 1.0}, step=0)
    size = os.path.getsize(Path(directory) / "digits/metrics.jsonl")
    with full_disk(size + 30):
        for step in range(1, 6):
            accelerator.log({"loss": 1.0}, step=step)
    for one in accelerator._guards:
        one._retry_at = 0.0  # the pause is over
    for step in range(6, 9):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    return said


def test_a_full_disk_costs_records_and_not_the_training(tmp_path: Path) -> None:
    said = run_one(fill_the_disk, str(tmp_path))
    steps = [step for step, _ in logged(tmp_path / "digits/metrics.jsonl")]
    assert steps == [0, 6, 7, 8]
    assert ["failed, training continues" in text for text in said] == [True, False, False]
    assert said[1:] == [
        "tracker 'jsonl' works again; records lost so far: 5",
        "tracker 'jsonl' lost 5 records",
    ]


def test_misuse_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrackerError, match=r"use it between start"):
        JSONLTracker("run", tmp_path).log({"loss": 1.0})
    tracker = open_tracker(tmp_path)
    with pytest.raises(ArgumentError, match="takes no log_kwargs, got epoch"):
        tracker.log({"loss": 1.0}, epoch=1)
    tracker.finish()
    tracker.finish()
    with pytest.raises(TrackerError, match="is not open"):
        tracker.log({"loss": 1.0})
