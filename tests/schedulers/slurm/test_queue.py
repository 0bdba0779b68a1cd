"""How long an answer of squeue's stands, and who reads it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from schedulers.slurm.login import slurm_commands as commands
from schedulers.slurm.login import squeue_cache


@pytest.mark.parametrize(
    ("age_s", "took_s", "error", "stands"),
    [
        (1.0, 0.01, "", True),
        (1.6, 0.01, "", False),
        (9.0, 1.0, "", True),  # ten times as long as it took
        (11.0, 1.0, "", False),
        (29.0, 20.0, "", True),  # and no longer than 30 s
        (31.0, 20.0, "", False),
        (1.9, 1.0, "no answer", True),  # what failed is tried again sooner
        (2.1, 1.0, "no answer", False),
        (-1.0, 0.01, "", False),  # the clock of whoever asked is ahead
    ],
)
def test_how_long_an_answer_stands(
    age_s: float, took_s: float, error: str, stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = squeue_cache.CachedOutput(1000.0, took_s, error, "")
    monkeypatch.setattr(time, "time", lambda: 1000.0 + took_s + age_s)
    assert answer.is_fresh(0.0) is stands
    assert not answer.is_fresh(since=1000.5)  # a job was submitted since


@pytest.mark.parametrize(("status", "says"), [(0, ""), (1, "Unable to contact slurm controller")])
def test_an_answer_is_for_all_who_ask(status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That there is none too; and what squeue says is kept as it is, for this user alone."""
    row = commands.SEPARATOR.join(["7", "7", "PENDING", "0", "0", "0", "Über\udcff", "accel:x", "/x"])
    (tmp_path / "rows").write_bytes((row + commands.SEPARATOR + "\n").encode("utf-8", "surrogateescape"))
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\necho >> {tmp_path}/calls\ncat {tmp_path}/rows\necho '{says}' >&2\nexit {status}\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(squeue_cache, "PACE_S", 1000.0)
    root = tmp_path / "root"
    root.mkdir()

    def ask(since: float = 0.0) -> str:
        try:
            return squeue_cache.read(str(root), {}, since).rows["7"]["reason"]
        except commands.Unanswered as error:
            return str(error)

    def calls() -> int:
        return len((tmp_path / "calls").read_text().splitlines())

    expected = f"squeue: {says}" if says else "Über\udcff"
    assert ask() == ask() == expected
    squeue_cache._cache.clear()  # as another process
    assert (ask(), calls()) == (expected, 1)
    assert [path.stat().st_mode & 0o077 for path in root.iterdir()] == [0, 0]
    assert (ask(since=time.time()), calls()) == (expected, 2)
    squeue_cache.forget(str(root), {})
    assert (ask(), calls()) == (expected, 3)


def test_a_command_that_is_too_long_is_no_answer() -> None:
    with pytest.raises(commands.Unanswered, match="true cannot be run: argument list too long"):
        commands.call(["true", "x" * 200_000])
