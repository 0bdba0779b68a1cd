"""What ``log_with`` takes, what it refuses, and in which words."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import accel.tracking
from accel.enums import LoggerType
from accel.errors import ArgumentError
from accel.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    JSONLTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
)
from accel.tracking.mlflow import MLflowTracker
from tests.needs import package

from .scripts import need


class Listing(GeneralTracker):
    name = "listing"
    requires_logging_directory = False

    def __init__(self, run_name: str = "") -> None:
        super().__init__()
        self.rows: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.rows


@pytest.fixture(autouse=True)
def known_classes() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda package: False)


def test_names_instances_and_classes_each_once(tmp_path: Path) -> None:
    own = Listing()
    chosen = filter_trackers(["jsonl", LoggerType.JSONL, own, own, Listing], tmp_path)
    assert chosen == [LoggerType.JSONL, own, Listing]
    assert filter_trackers("jsonl", tmp_path) == [LoggerType.JSONL]
    assert filter_trackers(None) == []
    assert filter_trackers([]) == []
    assert filter_trackers(own) == [own]


def test_all_is_every_one_that_is_installed(tmp_path: Path, nothing_installed: None) -> None:
    assert filter_trackers("all", tmp_path) == [LoggerType.JSONL] == get_available_trackers()
    own = Listing()
    assert filter_trackers([own, LoggerType.ALL, "jsonl"], tmp_path) == [own, LoggerType.JSONL]


def test_all_leaves_out_what_has_no_directory(nothing_installed: None, caplog: pytest.LogCaptureFixture) -> None:
    assert filter_trackers("all") == []
    assert caplog.messages == ["log_with='all' skips jsonl: pass project_dir or logging_dir to use it"]


@pytest.mark.parametrize(
    ("log_with", "said"),
    [
        ("wandbb", "log_with='wandbb' is not one of aim, comet_ml, mlflow, tensorboard, wandb, clearml, dvclive, "
         "swanlab, trackio, jsonl, all; did you mean 'wandb'?"),
        ([3, "jsonl"], "log_with=3 (int) is not one of"),
        (int, "log_with takes a subclass of GeneralTracker, got <class 'int'>"),
        ("jsonl", "log_with='jsonl' needs a directory: pass Accelerator(project_dir=…) or "
         "ProjectConfiguration(logging_dir=…)"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(log_with: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        filter_trackers(log_with)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_missing_comes_with_its_remedy(tmp_path: Path, nothing_installed: None) -> None:
    for name in ("wandb", LoggerType.TENSORBOARD):
        with pytest.raises(ArgumentError, match=rf"^log_with='{name}' needs the package {name}.*: pip install {name}$"):
            filter_trackers(name, tmp_path)


def test_a_class_that_is_registered_goes_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        filter_trackers("listing")
    register_tracker_class(Listing)
    assert filter_trackers("listing") == ["listing"]
    with pytest.warns(UserWarning, match="tracker 'listing' is replaced by Listing"):
        register_tracker_class(Listing)


def test_a_registered_class_may_stand_for_a_package_that_is_missing(nothing_installed: None) -> None:
    stand_in = type("StandIn", (Listing,), {"name": "wandb", "__module__": "script"})
    with pytest.warns(UserWarning, match="'wandb' is replaced"):
        register_tracker_class(stand_in)
    assert filter_trackers("wandb") == [LoggerType.WANDB]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, "takes a subclass of GeneralTracker"),
        (Listing(), "takes a subclass of GeneralTracker"),
        (type("Nameless", (GeneralTracker,), {"requires_logging_directory": False}), "lacks the class attribute name"),
        (type("Homeless", (GeneralTracker,), {"name": "x"}), "lacks the class attribute requires_logging_directory"),
    ],
)
def test_a_class_that_lacks_something_is_not_registered(kind: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        register_tracker_class(kind)


def test_an_incomplete_tracker_says_what_it_lacks() -> None:
    class Bare(GeneralTracker):
        name = "bare"

    with pytest.raises(NotImplementedError, match="Bare lacks requires_logging_directory, tracker"):
        Bare()
    assert isinstance(GeneralTracker(_blank=True), GeneralTracker)


def test_asking_what_is_available_imports_no_package() -> None:
    script = (
        "import sys, accel.tracking as t\n"
        "t.get_available_trackers(), t.LOGGER_TYPE_TO_CLASS, [getattr(t, n) for n in t.__all__]\n"
        "heavy = {'torch', 'numpy', 'wandb', 'mlflow', 'tensorboard', 'comet_ml', 'clearml', 'dvclive', 'swanlab',"
        " 'trackio', 'aim'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_only_the_control_is_imported_with_accelerator() -> None:
    script = (
        "import sys, accel.accelerator\n"
        "mine = sorted(m for m in sys.modules if m.startswith('accel.tracking'))\n"
        "assert mine == [], mine\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


METHODS = (
    "__init__ start store_init_configuration log log_images log_table log_figure log_artifact log_artifacts finish"
).split()


def test_signatures_are_accelerates() -> None:
    theirs = package("accelerate.tracking")
    names = [name for name in dir(theirs) if name.endswith("Tracker")]
    assert len(names) == 10
    for name in names:
        mine, other = getattr(accel.tracking, name), getattr(theirs, name)
        for attribute in ("name", "requires_logging_directory", "main_process_only"):
            assert getattr(mine, attribute, None) == getattr(other, attribute, None), (name, attribute)
        for method in METHODS:
            if hasattr(other, method):
                assert parameters(getattr(mine, method)) == parameters(getattr(other, method)), (name, method)
    for function in ("filter_trackers", "get_available_trackers", "register_tracker_class", "on_main_process"):
        assert parameters(getattr(accel.tracking, function)) == parameters(getattr(theirs, function)), function
    assert set(LOGGER_TYPE_TO_CLASS) - {"jsonl"} == set(theirs.LOGGER_TYPE_TO_CLASS)


def test_the_same_trackers_are_found_as_by_accelerate() -> None:
    theirs = package("accelerate.tracking")
    need("tensorboard")
    mine = {str(kind) for kind in get_available_trackers()}
    assert mine == {*map(str, theirs.get_available_trackers()), "jsonl"}


def test_mlflow_reads_its_variables_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "vision"}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "yes")
    tracker = MLflowTracker("digits", tags={"x": "y"})
    assert (tracker.experiment_name, tracker.run_id, tracker.tags) == ("named", "abc", {"team": "vision"})
    assert tracker.nested_run is True
    monkeypatch.setenv("MLFLOW_TAGS", "team=vision")
    with pytest.raises(ArgumentError, match="are not a JSON object"):
        MLflowTracker("digits")


def test_the_name_of_a_jsonl_file_is_the_projects(tmp_path: Path) -> None:
    assert JSONLTracker("a/b", tmp_path).tracker == tmp_path / "a/b/metrics.jsonl"
