"""Tests of the reaper: it ends the processes with the job's mark, and none of another job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Starts an unmarked process, one with the mark of another job, and an unmarked child of that one.
STARTS = """
import os, subprocess, sys
from schedulers.processes import adopt_orphans
adopt_orphans()
bare = subprocess.Popen(["env", "-i", "sleep", "1000"])
shell = "env -i sleep 1000 & echo $!; wait"
other = subprocess.Popen(["sh", "-c", shell], env={**os.environ, "ACCEL_JOB_ID": "other"}, stdout=subprocess.PIPE)
child = int(other.stdout.readline())
"""
ENDS = {
    "supervisors, launchers and node tasks": """
from schedulers.processes import descendants, end_all
end_all(lambda: descendants(os.getpid()), grace_s=0)
""",
    "hosts": """
import time
from schedulers.hosts.supervisor.reaper import ProcessReaper
reaper = ProcessReaper("mine")
while not reaper.done(0.0):
    time.sleep(0.01)
""",
}
REPORTS = """
print(bare.poll() is None, other.poll() is None, os.path.exists(f"/proc/{child}"))
os.kill(child, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("where", ENDS)
def test_another_job_and_what_it_started_are_left_alone(where: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STARTS + ENDS[where] + REPORTS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCEL_JOB_ID": "mine"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("False True True\n", "")
