"""What option values mean."""

from __future__ import annotations

import contextlib
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cli import arguments


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("45s", 45.0),
        ("30m", 1800.0),
        ("1h30m", 5400.0),
        ("1.5d", 129_600.0),
        ("2w1d", 1_296_000.0),
        ("1d2h3m4s", 93_784.0),
        ("01:30:00", 5400.0),
        ("2-00:00:05", 172_805.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert arguments.duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "30x", "-5", "1h 30m", "30m1h", "1h1h", "1:30", "1:90:00", "inf", "nan", "1e3", "٣"]
)
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="not a duration"):
        arguments.duration(text)


@given(st.text())
def test_any_text_is_a_length_of_time_or_refused(text: str) -> None:
    with contextlib.suppress(ArgumentTypeError):
        assert arguments.duration(text) >= 0


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [("16", 16.0), ("16G", 16.0), ("16gb", 16.0), ("16 GiB", 16.0), ("512M", 0.5), ("1.5T", 1536.0), ("1048576K", 1.0)],
)
def test_memory(text: str, gigabytes: float) -> None:
    assert arguments.memory(text) == gigabytes


@pytest.mark.parametrize("text", ["", "G", "-1", "16X", "16GG", "sixteen", "1e3"])
def test_what_is_not_an_amount_of_memory(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="not an amount of memory"):
        arguments.memory(text)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("n=4", ("n", 4)),
        ("n=4.5", ("n", 4.5)),
        ("n=true", ("n", True)),
        ("n=null", ("n", None)),
        ("n=", ("n", None)),
        ('n="4"', ("n", "4")),
        ("n=a=b", ("n", "a=b")),
        ("hosts=[a, b]", ("hosts", ["a", "b"])),
        ("day=2024-01-01", ("day", "2024-01-01")),
    ],
)
def test_target_options_are_typed_as_yaml(text: str, pair: tuple[str, Any]) -> None:
    assert arguments.target_option(text) == pair


@pytest.mark.parametrize(
    ("convert", "text", "message"),
    [
        (arguments.target_option, "hosts=[a", "the value of hosts is not a YAML value"),
        (arguments.target_option, "hosts", "expects KEY=VALUE, not 'hosts'"),
        (arguments.key_value, "=x", "expects KEY=VALUE"),
        (arguments.integer, "1.5", "not a whole number: '1.5'"),
        (arguments.integer, "", "not a whole number: ''"),
        (
            arguments.environment,
            "ACCEL_TEST_UNSET",
            "is not set here; give its value: --env ACCEL_TEST_UNSET=VALUE",
        ),
    ],
)
def test_wrong_values_are_refused(convert: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        convert(text)


def test_a_variable_is_taken_as_given_or_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_SET", "a=b\n")
    assert arguments.environment("ACCEL_TEST_SET") == ("ACCEL_TEST_SET", "a=b\n")
    assert arguments.environment("ACCEL_TEST_SET=") == ("ACCEL_TEST_SET", "")
    assert arguments.environment("X=1=2") == ("X", "1=2")


def test_a_secret_given_by_value_is_refused_without_being_repeated() -> None:
    assert arguments.secret("TOKEN=env:HF_TOKEN") == ("TOKEN", "env:HF_TOKEN")
    assert arguments.secret("KEY=file:/run/k") == ("KEY", "file:/run/k")
    with pytest.raises(ArgumentTypeError) as caught:
        arguments.secret("TOKEN=hf_abcdef")
    assert "abcdef" not in str(caught.value)
