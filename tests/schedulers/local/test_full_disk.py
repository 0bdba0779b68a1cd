"""Local jobs whose program fills the disk that holds their directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import schedulers
from schedulers import Reason, State
from schedulers.errors import SchedulerError

from .conftest import Submit

FILL = """
import os
with open(os.environ["ACCEL_JOB_DIR"] + "/ballast", "wb", buffering=0) as ballast:
    try:
        while ballast.write(b"x" * 4096):
            pass
    except OSError:
        pass
raise SystemExit({code})
"""


@pytest.mark.parametrize(
    ("code", "state", "reason"), [(0, State.SUCCEEDED, Reason.NONE), (3, State.FAILED, Reason.EXIT_CODE)]
)
def test_how_it_ended_is_known(
    submit: Submit, small_disk: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: State, reason: Reason
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(small_disk))
    job = submit(FILL.format(code=code))
    status = job.wait()
    assert (status.state, status.reason, status.exit_code) == (state, reason, code), status
    assert status.message.endswith("its disk was full: lines of its logs may be missing")
    assert json.loads((job.record.directory / "exit.json").read_text())["state"] == state.value
    assert schedulers.find(job.id).status(refresh=False) == status
    for path in job.record.directory.rglob("*"):  # what was reserved is given back, but for a block or two
        assert path.stat().st_blocks * 512 - path.stat().st_size < 3 * 4096, path


def test_a_submit_that_finds_no_space_says_so(
    submit: Submit, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little is left: the code, the record or the supervisor is what finds none."""
    monkeypatch.setenv("ACCEL_HOME", str(small_disk))
    submit("pass").wait()
    ballast = small_disk / "ballast"
    refused = []
    for left in range(0, 24, 2):
        disk = os.statvfs(small_disk)
        size = ballast.stat().st_size if ballast.exists() else 0
        with open(ballast, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, size + disk.f_bavail * disk.f_bsize)
            file.truncate(size + (disk.f_bavail - left) * disk.f_bsize)
        try:
            submit("pass").wait()
        except SchedulerError as error:
            refused.append(str(error))
    assert refused
    assert [error for error in refused if "no space" not in error.lower()] == []
