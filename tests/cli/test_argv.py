"""The words of a script reach it untouched, whatever they are; a command's own options may be spelled both ways."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cli.arguments import Parser
from accel.cli.argv import UsageError, split
from accel.cli.submit import add_arguments

OPTIONS = {"-h": False, "--json": False, "--name": True, "--max-restarts": True, "-f": False, "--num_processes": True}

NASTY = [
    *("", "-", "--", "---", "-h", "-m", "-1", "--=", "=", "--name", "--name=x", "--json", "--ünïcode", "\udcff\udc80"),
    *("$(reboot)", "`id`", "a b", "'", '"', "\n", "\t", "\\", "*", "~", "@last", "!!", "%s", "{}", "x" * 100_000),
]
HOSTILE = st.one_of(st.text(), st.sampled_from(NASTY))

OWN = st.lists(
    st.one_of(
        st.sampled_from([["--json"], ["-f"]]),
        st.tuples(st.sampled_from(["--name", "--max-restarts", "--max_restarts", "--num-processes"]), HOSTILE).map(
            lambda pair: [f"{pair[0]}={pair[1]}"]
        ),
        st.tuples(st.just("--name"), st.text().filter(lambda word: not word.startswith("-"))).map(list),
    )
).map(lambda groups: [word for group in groups for word in group])


@given(own=OWN, script=HOSTILE.filter(lambda word: word in ("", "-") or word[0] != "-"), rest=st.lists(HOSTILE))
def test_the_script_and_all_that_follows_it_are_untouched(own: list[str], script: str, rest: list[str]) -> None:
    _, words = split("accel x", OPTIONS, [*own, script, *rest], first_word_ends=True)
    assert words == [script, *rest]


@given(own=OWN, rest=st.lists(HOSTILE))
def test_after_a_double_dash_even_what_looks_like_an_option_is_the_script(own: list[str], rest: list[str]) -> None:
    _, words = split("accel x", OPTIONS, [*own, "--", *rest], first_word_ends=True)
    assert words == rest


@given(name=HOSTILE, rest=st.lists(HOSTILE))
def test_the_parser_sees_a_value_as_it_was_typed(name: str, rest: list[str]) -> None:
    parser = Parser("submit", "Submit")
    add_arguments(parser)
    args, words = parser.read_before_script([f"--name={name}", "--max_restarts", "3", "--json", "--", *rest])
    assert (args.name, args.max_restarts, args.json, words) == (name, 3, True, rest)


@given(st.lists(HOSTILE))
def test_any_line_is_split_or_refused(argv: list[str]) -> None:
    try:
        own, words = split("accel x", OPTIONS, argv, first_word_ends=True)
    except UsageError:
        return
    assert all(word.partition("=")[0] in OPTIONS for word in own)
    assert words == argv[len(argv) - len(words) :]


@pytest.mark.parametrize(
    ("argv", "own", "words"),
    [
        ([], [], []),
        (["--name", "a", "b", "-f"], ["--name=a", "-f"], ["b"]),
        (["b", "--max_restarts=1"], ["--max-restarts=1"], ["b"]),
        (["--num-processes", "2"], ["--num_processes=2"], []),
        (["--name", "-5", "-"], ["--name=-5"], ["-"]),
        (["--name=", "--", "-f", "--"], ["--name="], ["-f", "--"]),
        (["a", "--", "b"], [], ["a", "b"]),
    ],
)
def test_words_and_options_in_any_order(argv: Sequence[str], own: list[str], words: list[str]) -> None:
    assert split("accel x", OPTIONS, argv, first_word_ends=False) == (own, words)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nam", "x"], "unknown option '--nam'; did you mean '--name'? (accel x --help lists them)"),
        (["--qqqq"], "unknown option '--qqqq' (accel x --help lists them)"),
        (["-fx"], "unknown option '-fx'"),
        (["--name"], "--name needs a value"),
        (["--name", "--json"], "--name needs a value (if '--json' is the value: --name=--json)"),
        (["--name", "--", "x"], "--name needs a value (if '--' is the value: --name=--)"),
        (["--json=yes"], "--json takes no value: write it without '=yes'"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_type(argv: Sequence[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split("accel x", OPTIONS, argv, first_word_ends=True)
    assert str(caught.value).startswith(message)
