"""Following a job while Slurm comes and goes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from schedulers import Job, State
from schedulers.jobs.poll import restore
from tests.clusters.slurm import Slurm
from tests.waiting import until

from .conftest import Submit, is_saved, printed

COUNTS = "n=0; while [ ! -e {end} ]; do n=$((n + 1)); echo line $n; sleep 0.05; done; echo the end"


class Follower(threading.Thread):
    """Reads a job's output as it comes."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job = job
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        for line in self._job.logs(follow=True, ranks=[0]):
            self.lines.append(line.text)


def test_the_controller_is_restarted_meanwhile(slurm: Slurm, submit: Submit, project: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end))
    follower = Follower(job)
    until(lambda: len(follower.lines) > 5, "lines come")
    is_saved(slurm, job)
    slurm.kill_controller()
    before = len(follower.lines)
    until(lambda: len(follower.lines) > before + 5, "lines come without a controller")
    slurm.start_controller()
    end.touch()
    assert job.wait(90).state is State.SUCCEEDED
    follower.join(60)
    assert not follower.is_alive()
    count = len(follower.lines) - 1
    assert follower.lines == [*(f"line {number + 1}\n" for number in range(count)), "the end\n"]


def test_the_end_needs_no_controller(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    """A job that ends while the controller is down has ended: its result says so."""
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end))
    until(lambda: "line 1\n" in printed(job), "it runs")
    slurm.kill_controller()
    end.touch()
    assert job.wait(90).state is State.SUCCEEDED
    slurm.start_controller()


def test_a_line_without_its_end(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(f"printf 'whole\\npart'; while [ ! -e {end} ]; do sleep 0.05; done; printf 'ial\\nlast'")
    until(lambda: "whole\n" in printed(job), "it runs")
    assert printed(job) == "whole\n"
    end.touch()
    assert job.wait(90).state is State.SUCCEEDED
    assert printed(job) == "whole\npartial\nlast"


def test_waiting_is_told_of_the_end(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(COUNTS.format(end=end))
    target = restore(job.record)
    native = str(job.native_id)
    until(lambda: "line 1\n" in printed(job), "it runs")
    assert target.wait(native, 0.2) is False  # type: ignore[attr-defined]
    end.touch()
    assert target.wait(native, 60) is True  # type: ignore[attr-defined]
    assert target.poll([native])[native].state is State.SUCCEEDED


def test_since_a_time(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = submit(f"echo early; while [ ! -e {end} ]; do sleep 0.05; done; echo late")
    until(lambda: printed(job) == "early\n", "it prints")
    until(lambda: (job.record.directory / "logs/sizes.jsonl").exists(), "its size is noted")
    noted = '"rank-0.a0": 6'  # all of "early\n"
    until(lambda: noted in (job.record.directory / "logs/sizes.jsonl").read_text(), "its size is noted")
    moment = time.time()
    end.touch()
    job.wait(90)
    assert [line.text for line in job.logs(since=moment, ranks=[0])] == ["late\n"]
