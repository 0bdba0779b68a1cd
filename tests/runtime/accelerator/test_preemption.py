"""Warnings of a preemption: noted by a handler, agreed on at one step, answered with a checkpoint and an exit code."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel.checkpoint.manifest import find_damage
from accel.exit_codes import REQUEUE
from accel.tracking import GeneralTracker
from accel.tracking.jsonl import read_records

from ..worlds import outcomes, run, run_one


def _seen_at(signum: int, at: int, rank: int) -> int:
    """The first reading that is true, with a signal to one process before reading ``at``."""
    accelerator = Accelerator()
    for reading in range(400):
        if reading == at and accelerator.process_index == rank:
            os.kill(os.getpid(), signum)
        if accelerator.preempted:
            assert accelerator.preempted  # and stays so
            return reading
    return -1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize(("processes", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_all_see_it_at_the_same_reading(signum: int, processes: int, rank: int) -> None:
    seen = set(run(_seen_at, int(signum), 5, rank, processes=processes))
    assert len(seen) == 1
    (reading,) = seen
    assert 5 <= reading <= 5 + 3 * 16
    if processes == 1:
        assert reading == 5


def _nobody() -> list[Any]:
    accelerator = Accelerator()
    seen = [accelerator.preempted for _ in range(100)]
    accelerator.end_training()
    return [any(seen), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]


def test_without_a_warning_it_stays_false_and_signals_are_given_back() -> None:
    assert run(_nobody) == [[False, True]] * 2


def _script_that_never_asks() -> list[Any]:
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: got.append(signum))
    Accelerator()
    os.kill(os.getpid(), signal.SIGTERM)
    return got


def test_a_script_that_never_asks_keeps_its_handlers() -> None:
    assert run_one(_script_that_never_asks) == [signal.SIGTERM]
    assert outcomes(_dies, processes=1)[0].error == "Died"


def _dies() -> None:
    Accelerator()
    os.kill(os.getpid(), signal.SIGTERM)


def _ignored_from_the_start() -> Any:
    """As under `accel launch`: a warning that comes before the first reading counts."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    accelerator = Accelerator()
    os.kill(os.getpid(), signal.SIGUSR1)
    return accelerator.preempted


def test_a_warning_before_the_first_reading_counts_where_it_was_ignored() -> None:
    assert run_one(_ignored_from_the_start) is True


def _in_a_thread() -> Any:
    told: list[str] = []

    def work() -> None:
        accelerator = Accelerator()
        try:
            _ = accelerator.preempted
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return told


def test_off_the_main_thread_it_is_said() -> None:
    assert run_one(_in_a_thread) == ["Accelerator.preempted must first be read in the main thread: signals go there"]


def _forked_child_dies() -> Any:
    accelerator = Accelerator()
    assert not accelerator.preempted
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")
        while True:
            time.sleep(0.01)
    os.read(reader, 1)  # Python forgets the signals that come while it is still forking
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), accelerator.preempted


def test_processes_of_the_script_can_still_be_ended() -> None:
    assert run_one(_forked_child_dies) == (-signal.SIGTERM, False)


def _checkpoint(directory: str | None, project: str) -> None:
    config = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=directory is None)
    accelerator = Accelerator(project_config=config)
    model = accelerator.prepare(nn.Linear(1, 1))
    for step in range(200):
        if step == 3 and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGUSR1) if accelerator.preempted is False else None
        elif step == 3:
            assert accelerator.preempted is False
        with torch.no_grad():
            next(model.parameters()).fill_(step)
        accelerator.checkpoint_on_preemption(directory)
    raise AssertionError("it was not preempted")


def _exit_code(directory: str | None, project: str) -> Any:
    try:
        _checkpoint(directory, project)
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_the_state_is_saved_and_the_exit_asks_for_a_requeue(tmp_path: Path, processes: int, named: bool) -> None:
    directory = str(tmp_path / "here") if named else None
    assert run(_exit_code, directory, str(tmp_path / "project"), processes=processes) == [REQUEUE] * processes
    place = tmp_path / "here" if named else tmp_path / "project/checkpoints/checkpoint_0"
    assert find_damage(place) is None


class Unfinished(GeneralTracker):
    """A tracker that cannot be finished."""

    name = "unfinished"
    requires_logging_directory = False
    tracker = None

    def finish(self) -> None:
        raise ValueError("half a record is left")


def _tracked(project: str, trackers: list[Any], ends_itself: bool) -> list[Any]:
    accelerator = Accelerator(project_dir=project, log_with=trackers)
    accelerator.init_trackers("run")
    _ = accelerator.preempted
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        for step in range(200):
            accelerator.log({"loss": 1.0}, step=step)
            accelerator.checkpoint_on_preemption(f"{project}/kept")
    except SystemExit as end:
        if ends_itself:
            accelerator.end_training()  # as a script's `finally` would
        return [end.code, step]
    return [None, -1]


@pytest.mark.parametrize(("processes", "ends_itself"), [(1, False), (1, True), (2, False)])
def test_trackers_are_finished_once(tmp_path: Path, processes: int, ends_itself: bool) -> None:
    ended = run(_tracked, str(tmp_path), ["jsonl"], ends_itself, processes=processes)
    assert [code for code, _ in ended] == [REQUEUE] * processes
    records = list(read_records(tmp_path / "run/metrics.jsonl"))
    assert [record["kind"] for record in records] == ["start", *["log"] * (ended[0][1] + 1), "end"]


def test_a_tracker_that_cannot_finish_does_not_cost_the_requeue(tmp_path: Path) -> None:
    ((code, _),) = run(_tracked, str(tmp_path), [Unfinished, "jsonl"], False, processes=1)
    assert code == REQUEUE
    assert find_damage(tmp_path / "kept") is None
    assert [record["kind"] for record in read_records(tmp_path / "run/metrics.jsonl")][-1] == "end"


def test_where_to_save_is_asked_at_once(tmp_path: Path) -> None:
    ended = outcomes(_no_place, processes=1)[0]
    assert ended.error == "ArgumentError"
    assert "automatic_checkpoint_naming=True" in ended.message


def _no_place() -> None:
    Accelerator().checkpoint_on_preemption()
