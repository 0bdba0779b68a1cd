"""What the local target would do, held by a golden file."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedulers import JobSpec, Resources, Retry
from schedulers.local.target import LocalOptions, LocalTarget
from schedulers.target import TargetContext
from tests.golden import assert_golden


def test_a_plan_with_everything() -> None:
    options = LocalOptions(concurrency=2, snapshot=True, python="/opt/python/bin/python")
    target = LocalTarget(TargetContext(name="bench", options=options, jobs=Path("/home/me/accel/jobs")))
    spec = JobSpec(
        argv=("train.py", "--name", 'it\'s a "job"', "", "a\nb", "ü"),
        name="everything, at once",
        procs_per_node=2,
        resources=Resources(gpus=2, cpus=8, memory_gb=16),
        env={"A": "1 2"},
        secrets={"HF_TOKEN": "env:HF_TOKEN"},
        code="/home/me/project",
        workdir="examples",
        setup=(("pip", "install", "-e", "."),),
        time_limit_s=3600,
        grace_s=12.5,
        retry=Retry(max_restarts=3),
        after=("2mx00000000",),
    )
    assert_golden("local_plan.txt", str(target.plan(spec, "2mxaaaaaaaa")))


def test_the_interpreter_may_be_below_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = LocalOptions(python="~/venv/bin/python")
    target = LocalTarget(TargetContext(name="bench", options=options, jobs=Path("/home/me/accel/jobs")))
    text = str(target.plan(JobSpec(argv=("train.py",)), "2mxaaaaaaaa"))
    assert "/home/me/venv/bin/python -m accel launch" in text
    assert "~" not in text
