"""The time limit that the launcher keeps itself, counted from the first start in its pod."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from accel.exit_codes import TIME_LIMIT
from accel.launch import deadline
from accel.launch.errors import LaunchConfigError
from accel.launch.multi_process import Signals
from schedulers.job import Reason
from schedulers.kubernetes.manifests import pods
from schedulers.kubernetes.status import pod_states
from tests.ports import free_port

from .conftest import Launcher

WAITS = """\
import os, signal, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
def end(*_):
    print("saved in attempt", attempt, flush=True)
    raise SystemExit(85)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(0.01)
"""
OVER = "accel launch: the time limit of 100 s is over; all ranks on this node were terminated"


def past(tmp_path: Path, seconds: float) -> dict[str, str]:
    """The variables of a pod whose first launcher was started so long ago."""
    starts = tmp_path / "starts"
    starts.write_text(f"{time.time() - seconds}\n")
    return {
        "ACCEL_POD_UID": "a", "ACCEL_STARTS": str(starts), "ACCEL_TIME_LIMIT": "100", "ACCEL_TIME_LIMIT_EXIT": "86,0",
    }  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("--num_processes", "2", "--tee", "3", "--log_dir", "logs")])
def test_ranks_end_when_the_limit_has_passed(launcher: Launcher, tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = launcher.start(*flags, launcher.script(WAITS), within=past(tmp_path, 0))
    run.says("ready")
    run.send(signal.SIGALRM)  # as the clock would
    done = run.wait()
    assert done.code == 86, done
    assert "saved in attempt 1" in done.out
    assert OVER in done.err
    assert pod_states.read_report(done.err) is not None
    launcher.nothing_left()


@pytest.mark.parametrize("flags", [(), ("--num_processes", "2")])
def test_the_limit_counts_from_the_first_start_in_the_pod(
    launcher: Launcher, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    done = launcher.start(*flags, launcher.script(WAITS), within=past(tmp_path, 1000)).wait()
    assert done.code == 86, done
    assert OVER in done.err


def test_the_limit_of_one_node_is_that_of_all(launcher: Launcher, tmp_path: Path) -> None:
    """Node 0 goes last, with the code that ends the job; the clocks of the others may be late."""
    cluster = {"ACCEL_NODES": "2", "ACCEL_MASTER": "127.0.0.1", "ACCEL_PORT": str(free_port())}
    runs = []
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        pod = past(tmp_path / str(rank), 0) | cluster | {"ACCEL_NODE_RANK": str(rank)}
        flags = ("--num_processes", "2", "--tee", "3", "--log_dir", f"n{rank}")
        runs.append(launcher.start(*flags, launcher.script(WAITS), within=pod))
    for run in runs:
        run.says("ready")
    runs[1].send(signal.SIGALRM)
    for run, code in zip(runs, (86, 0), strict=True):
        done = run.wait()
        assert done.code == code, done
        assert OVER in done.err
    launcher.nothing_left()


def test_an_alarm_is_set_for_what_is_left() -> None:
    try:
        deadline.Deadline(limit_s=1000, exit_code=86, first_at=time.time() - 400).arm()
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_signal_goes_before_the_limit(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(WAITS.replace("SystemExit(85)", "SystemExit(0)"))
    run = launcher.start("--num_processes", "2", "--tee", "3", "--log_dir", "logs", script, within=past(tmp_path, 0))
    run.says("ready")
    run.send(signal.SIGTERM)
    assert run.wait().code == 143


@pytest.mark.parametrize(
    ("first", "second", "hurried"),
    [(signal.SIGTERM, signal.SIGALRM, 0), (signal.SIGALRM, signal.SIGTERM, 1), (signal.SIGTERM, signal.SIGINT, 1)],
)
def test_the_limit_cuts_no_grace_short(first: signal.Signals, second: signal.Signals, hurried: int) -> None:
    server = Mock()
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        signals = Signals(server)
        for signum in (first, second):
            signal.raise_signal(signum)
        assert (signals.received, server.kill_now.call_count) == (first, hurried)
        with pytest.raises(SignalException) as told:
            signals.check()
        assert told.value.sigval == first
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)


def test_limits_that_are_no_numbers() -> None:
    with pytest.raises(LaunchConfigError, match="ACCEL_TIME_LIMIT must be a whole number, not 'x'"):
        deadline.deadline_from_env({"ACCEL_TIME_LIMIT": "x"}, 0)


def test_a_rank_keeps_no_limit() -> None:
    assert deadline.deadline_from_env({"ACCEL_TIME_LIMIT": "9", "ACCEL_LAUNCH_ID": "x"}, 0) is None
    assert deadline.deadline_from_env({}, 0) is None


def test_the_words_are_those_that_the_cluster_is_asked_for() -> None:
    assert pods.TIME_LIMIT == TIME_LIMIT
    report = pod_states.read_report(f"something\n{OVER}\n")
    assert report is not None
    assert report.reason is Reason.TIME_LIMIT
