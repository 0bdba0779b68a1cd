"""A local job whose ranks were warned and have left a checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

from accel.exit_codes import REQUEUE
from schedulers import Reason, State
from tests.waiting import until

from .conftest import Submit, identities

WARNED = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""


def test_it_ends_as_preempted(submit: Submit, project: Path) -> None:
    job = submit(WARNED)
    until(lambda: (project / "ready").exists(), "the program runs")
    until(lambda: job.status().state is State.RUNNING, "it is noted to run")
    identities(job)["launcher"].send(signal.SIGUSR1)
    status = job.wait(60)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.PREEMPTED, REQUEUE)
    assert "requested a restart" in status.message
