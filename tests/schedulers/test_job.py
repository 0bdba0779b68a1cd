"""JobSpec, Status and Cursor as data: what goes out comes back, and what is wrong is said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.errors import SpecError
from schedulers.job import Cursor, JobSpec, LogLine, Reason, Resources, Retry, State, Status

# Any text that can be an argument: lone surrogates stand for bytes that are not UTF-8; only NUL is impossible.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=40)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SPECS = st.builds(
    JobSpec,
    argv=st.lists(WORDS, max_size=5).map(lambda rest: ("train.py", *rest)),
    entry=st.sampled_from(["script", "module", "command"]),
    name=st.text(st.characters(categories=("L", "N", "P")), min_size=1).filter(str.isprintable),
    nodes=st.integers(1, 64),
    max_nodes=st.none() | st.integers(64, 128),
    procs_per_node=st.none() | st.integers(1, 16),
    resources=st.builds(Resources, gpus=st.integers(0, 8), memory_gb=st.none() | st.floats(0.5, 1e4)),
    env=st.dictionaries(NAMES.map("E_{}".format), WORDS, max_size=3),
    secrets=st.dictionaries(NAMES.map("S_{}".format), WORDS, max_size=2),
    setup=st.lists(st.lists(WORDS, max_size=3).map(tuple), max_size=2).map(tuple),
    time_limit_s=st.none() | st.floats(0.1, 1e7),
    retry=st.builds(Retry, max_restarts=st.integers(0, 5)),
    after=st.lists(NAMES, max_size=2).map(tuple),
    options=st.dictionaries(WORDS, PLAIN, max_size=3),
)
STATUSES = st.builds(
    Status,
    state=st.sampled_from(State),
    reason=st.sampled_from(Reason),
    exit_code=st.none() | st.integers(0, 255),
    attempt=st.integers(0, 9),
    message=WORDS,
    observed_at=st.floats(0, 1e10),
)


@given(SPECS)
def test_a_spec_survives_json(spec: JobSpec) -> None:
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@given(STATUSES)
def test_a_status_survives_json(status: Status) -> None:
    assert Status.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_status_from_a_later_version_is_read_without_what_is_new() -> None:
    assert Status.from_json({"state": "queued", "color": "green"}) == Status(state=State.QUEUED)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"argv": []}, "nothing to run"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["a"], "nodes": 0}, "nodes must be 1 or more, not 0"),
        ({"argv": ["a"], "name": "two\nlines"}, "one printable line"),
        ({"argv": ["a"], "time_limit_s": 0}, "time_limit"),
        ({"argv": ["a"], "env": {"A B": "x"}}, "'A B' is not a name"),
        ({"argv": ["a"], "env": {"A": "x"}, "secrets": {"A": "env:B"}}, "both as --env and as --secret"),
        ({"argv": ["a"], "resources": {"gpus": -1}}, "gpus must be 0 or more"),
        ({"argv": ["a"], "resources": {"memory_gb": 0}}, "^--memory must be more than 0, not 0; .*`sbatch: {mem: 0}`"),
        ({"argv": ["a"], "resources": {"shm_gb": -1}}, "shm_gb must be more than 0, not -1$"),
    ],
)
def test_what_no_target_can_run_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        JobSpec.from_json(wrong)


def test_numbers_in_env_become_text() -> None:
    env: Any = {"SEED": 1, "LR": 1e-3, "NAME": "x"}
    assert JobSpec(argv=("a",), env=env).env == {"SEED": "1", "LR": "0.001", "NAME": "x"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"env": {"A": True}}, r"^env: A must be text or a number, not bool True$"),
        ({"env": {"A": None}}, r"^env: A must be text or a number, not NoneType None$"),
        ({"env": {"A": ["x"]}}, r"^env: A must be text or a number, not list \['x'\]$"),
        ({"env": {1: "x"}}, r"^1 is not a name for an environment variable"),
        ({"secrets": {"A": 1}}, r"^secrets: A must be a reference such as env:NAME, not int$"),
        ({"argv": ("a", 0.1)}, r"^argument 0\.1 must be text, not float$"),
    ],
)
def test_a_value_of_another_type_is_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        JobSpec(**{"argv": ("a",), **wrong})


@pytest.mark.parametrize("data", [None, 3, [], {"argv": "train.py"}, {"argv": ["a"], "nodes": "two"}, {}])
def test_what_is_no_spec_is_refused_in_one_line(data: object) -> None:
    with pytest.raises(SpecError, match=r"^not a job spec: [^\n]*$"):
        JobSpec.from_json(data)


@given(st.sampled_from(State), st.sampled_from(State))
def test_transitions(old: State, new: State) -> None:
    allowed = old.may_become(new)
    if old.final:
        assert allowed == (new is old)
    elif new is State.SUBMITTING:
        assert allowed == (old is State.SUBMITTING)
    else:
        assert allowed


SOURCES = st.from_regex(r"[a-z0-9.-]{1,12}", fullmatch=True)


@given(st.dictionaries(SOURCES, SOURCES, max_size=5))
def test_a_cursor_survives_as_text(positions: dict[str, str]) -> None:
    cursor = Cursor(positions)
    assert Cursor.parse(str(cursor)) == cursor
    assert all(Cursor.parse(str(cursor)).position(source) == at for source, at in positions.items())


def test_a_cursor_moves_to_the_end_of_a_line() -> None:
    cursor = Cursor()
    cursor.advance(LogLine(rank=0, text="x\n", source="rank-0", position="2"))
    cursor.advance(LogLine(rank=0, text="y\n", source="rank-0", position="4"))
    assert str(cursor) == "rank-0=4"
    assert cursor.position("rank-1") is None


@pytest.mark.parametrize("text", ["rank-0", "=3", "rank-0=", "a=1,b"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not a log cursor"):
        Cursor.parse(text)
