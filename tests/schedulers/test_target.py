"""Plans as data, and how a kind of target is found: built in, or added by an installed package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.errors import ConfigError, UnknownTarget
from schedulers.target import BUILT_IN, Plan, kinds, load_kind, refused_entry_points

WORDS = st.text(st.characters(exclude_categories=()), max_size=20)
PLANS = st.builds(
    Plan,
    target=WORDS,
    kind=WORDS,
    job_id=WORDS,
    files=st.dictionaries(WORDS, WORDS, max_size=3),
    actions=st.lists(st.lists(WORDS, max_size=3).map(tuple), max_size=3).map(tuple),
    settings=st.dictionaries(WORDS, st.integers(-9, 9) | WORDS, max_size=3),
    warnings=st.lists(WORDS, max_size=2).map(tuple),
)


def install(site: Path, *points: str) -> None:
    """A package with these entry points, as pip leaves one behind."""
    info = site / "accel_test_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-test-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[accel.targets]", *points, ""]))


@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^not a plan: "):
        Plan.from_json({"target": 3})


def test_a_plan_reads_as_what_will_be_done() -> None:
    plan = Plan(
        target="lab",
        kind="local",
        job_id="1a2b",
        files={"run.sh": "true\n"},
        actions=(("echo", "two words", "$(x)"),),
        warnings=("slow",),
    )
    assert str(plan) == (
        "# job 1a2b on target lab (local)\n# warning: slow\n# file run.sh\ntrue\n$ echo 'two words' '$(x)'\n"
    )


def test_a_package_may_add_a_kind_and_never_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "moon = collections:OrderedDict", "local = collections:Counter")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kinds()["moon"] == "collections:OrderedDict"
    assert kinds()["local"] == BUILT_IN["local"]
    assert load_kind("moon").__name__ == "OrderedDict"
    assert load_kind("local").__name__ == "LocalTarget"
    assert refused_entry_points() == [
        "entry point local = collections:Counter is ignored: 'local' is a built-in kind of target"
    ]


def test_a_kind_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "moon = no_such_module:Moon", "sun = os:no_such_class", "star = os:getcwd")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'moon' \(no_such_module:Moon\) cannot be loaded: No module named"):
        load_kind("moon")
    with pytest.raises(ConfigError, match="no_such_class"):
        load_kind("sun")
    with pytest.raises(ConfigError, match="is not a class"):
        load_kind("star")


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UnknownTarget, match=r"no kind of target 'locla'; did you mean 'local'\? \(kinds: .*local"):
        load_kind("locla")
