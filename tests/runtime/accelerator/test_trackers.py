"""`Accelerator.init_trackers`, `log`, `get_tracker`, `end_training`: on which processes, and what becomes of errors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from accel import Accelerator
from accel.errors import ArgumentError, StateError
from accel.tracking import GeneralTracker, on_main_process
from accel.tracking.base import NoTracker
from accel.tracking.wandb import WandBTracker

from ..tracking.listing import Failing, Listing
from ..worlds import run, run_one


class Everywhere(Listing):
    name = "everywhere"
    main_process_only = False


class Housed(Listing):
    name = "housed"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, **more: Any) -> None:
        super().__init__(run_name, logging_dir=logging_dir, **more)


class DerivedFromWandb(Listing, WandBTracker):
    """Has ``main_process_only=False`` from accel's own class, which runs on one process all the same."""

    name = "derived"

    def __init__(self, run_name: str) -> None:
        GeneralTracker.__init__(self)
        self.calls = [("made", run_name, {})]

    def server(self) -> None:
        return None


def use(directory: str) -> list[Any]:
    instance, everywhere = Listing(), Everywhere()
    accelerator = Accelerator(log_with=[instance, everywhere, Housed, DerivedFromWandb], project_dir=directory)
    before = list(instance.calls)
    accelerator.init_trackers("digits", {"lr": 0.1}, {"housed": {"extra": 1}, "tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"listing": {"commit": True}})
    names = [tracker.name for tracker in accelerator.trackers]  # type: ignore[attr-defined]
    housed = accelerator.get_tracker("housed", unwrap=True)
    housed_calls = list(housed) if housed else "none"
    accelerator.end_training()
    accelerator.end_training()
    return [before, names, instance.calls, everywhere.calls, housed_calls]


def test_on_which_processes_trackers_run(tmp_path: Path) -> None:
    main, other = run(use, str(tmp_path))
    made: tuple[str, str, dict[str, Any]] = ("made", "", {})
    full = [made, "start", ("config", {"lr": 0.1}), ("log", {"loss": 1.0}, 3, {}), "finish"]
    listed = [made, "start", ("config", {"lr": 0.1}), ("log", {"loss": 1.0}, 3, {"commit": True}), "finish"]
    assert main[0] == [made], "nothing starts before init_trackers"
    assert main[1] == ["listing", "everywhere", "housed", "derived"]
    assert main[2:4] == [listed, full]
    assert main[4][0] == ("made", "digits", {"logging_dir": str(tmp_path), "extra": 1})
    assert other[1] == ["everywhere"]
    assert other[2:] == [[made], full, "none"]


class Decorated(Listing):
    name = "decorated"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(values)


def call_directly() -> list[bool]:
    accelerator = Accelerator()
    found = []
    for main_only in (True, False):
        tracker = Decorated()
        tracker.main_process_only = main_only
        tracker.log({"loss": 1.0})
        found.append({"loss": 1.0} in tracker.calls)
    accelerator.end_training()
    return found


def test_a_decorated_method_looks_at_the_process_when_called() -> None:
    assert run(call_directly) == [[True, True], [False, True]]


def no_trackers() -> list[Any]:
    accelerator = Accelerator()
    accelerator.init_trackers("digits", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=0)
    tracker = accelerator.get_tracker("wandb", unwrap=True)
    tracker.watch("model").more["x"] = 1
    accelerator.end_training()
    return [accelerator.trackers, accelerator.log_with, bool(tracker), list(tracker)]


def test_without_log_with_everything_does_nothing() -> None:
    assert run_one(no_trackers) == [[], [], False, []]


def misuse(directory: str) -> list[str]:
    said = []

    def caught(kind: type[Exception], function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as error:
            function(*args, **kwargs)
        assert "\n" not in str(error.value)
        said.append(str(error.value))

    accelerator = Accelerator(log_with=["jsonl", Listing()], project_dir=directory)
    caught(StateError, accelerator.get_tracker, "jsonl")
    caught(ArgumentError, accelerator.init_trackers, "digits", init_kwargs={"tensorbord": {}})
    caught(ArgumentError, accelerator.init_trackers, "digits", init_kwargs={"jsonl": {"run": 1}})
    accelerator.init_trackers("digits")
    caught(StateError, accelerator.init_trackers, "digits")
    caught(ArgumentError, accelerator.log, [1.0])
    caught(ArgumentError, accelerator.log, {"loss": 1.0}, log_kwargs={"json": {}})
    caught(ArgumentError, accelerator.get_tracker, "json")
    accelerator.end_training()
    return said


def test_misuse_is_said_in_one_line(tmp_path: Path) -> None:
    early, *said = run_one(misuse, str(tmp_path))
    assert early == "get_tracker('jsonl'): no tracker runs; init_trackers() starts them"
    assert said[2].startswith("init_trackers() was called already: ")
    assert said[0] == "init_kwargs: no tracker is called 'tensorbord'; did you mean 'tensorboard'?"
    assert said[1].startswith("init_kwargs of tracker 'jsonl': ")
    assert "unexpected keyword argument 'run'" in said[1]
    assert said[3] == "log() takes a dict of values by name, got list"
    assert said[4] == "log_kwargs: no tracker is called 'json'; did you mean 'jsonl'?"
    assert said[5] == "get_tracker('json'): log_with has jsonl, listing; did you mean 'jsonl'?"


def log_too_early(directory: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel.tracking").addHandler(handler)
    accelerator = Accelerator(log_with="jsonl", project_dir=directory)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    return said


def test_logging_before_anything_runs_is_said_once(tmp_path: Path) -> None:
    main, other = run(log_too_early, str(tmp_path))
    assert main == ["log() records nothing: no tracker runs (init_trackers() starts them)"]
    assert other == []


def two_trackers(where: str, error: Exception) -> list[Any]:
    failing, sound = Failing(where, error), Listing()
    accelerator = Accelerator(log_with=[sound, failing])
    try:
        accelerator.init_trackers("digits", {"lr": 0.1})
        accelerator.log({"loss": 1.0}, step=0)
        accelerator.end_training()
    except Exception as raised:
        return [type(raised).__name__, sound.calls[1:]]
    return [None, sound.calls[1:]]


WHOLE = ["start", ("config", {"lr": 0.1}), ("log", {"loss": 1.0}, 0, {}), "finish"]


@pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
def test_an_outage_of_one_tracker_stops_neither_training_nor_the_others(where: str) -> None:
    assert run_one(two_trackers, where, ConnectionRefusedError(111, "refused")) == [None, WHOLE]


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_scripts_own_mistake_is_raised_as_it_is(where: str) -> None:
    error, calls = run_one(two_trackers, where, KeyError("loss"))
    assert error == "KeyError"
    assert calls == (["start", "finish"] if where == "start" else WHOLE[:3]), "what was started is finished"


def test_the_stand_in_takes_everything() -> None:
    stand_in = NoTracker()
    stand_in.log({"loss": 1.0}, step=1)
    stand_in.start()
    assert stand_in.run.summary["x"](1, y=2) is stand_in
    assert not stand_in
    assert list(stand_in) == []
    with pytest.raises(AttributeError):
        stand_in.__wrapped__  # noqa: B018


class Twice(Listing):
    name = "twice"

    def finish(self) -> None:
        super().finish()
        raise KeyError("first" if self.calls[0][1] == "a" else "second")


def begin_again() -> list[Any]:
    first, second, sound = Twice("a"), Twice("b"), Listing()
    accelerator = Accelerator(log_with=[first, second, sound])
    accelerator.init_trackers("one")
    try:
        accelerator.end_training()
    except KeyError as error:
        said = error.args[0]
    accelerator.init_trackers("two")
    accelerator.log({"loss": 1.0})
    return [said, [tracker.calls.count("finish") for tracker in (first, second, sound)], sound.calls[1:]]


def test_all_trackers_are_finished_whatever_one_raises_and_may_begin_again() -> None:
    said, finished, calls = run_one(begin_again)
    assert said == "first"
    assert finished == [1, 1, 1]
    assert calls == ["start", "finish", "start", ("log", {"loss": 1.0}, None, {})]
