"""Parsers of option values: durations, memory, KEY=VALUE. Each raises ArgumentTypeError with one line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import Any

_SECONDS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1, "": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)[wdhms]", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_GIGABYTES = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "": 1.0, "T": 1024.0}
_REFERENCE = re.compile(r"[a-z][a-z0-9+-]*:.+", re.ASCII | re.DOTALL)


def duration(text: str) -> float:
    """Return seconds: `90`, `45s`, `30m`, `1h30m`, `1.5d`, `2w`, or Slurm's `HH:MM:SS` and `D-HH:MM:SS`."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    parts = _DURATION.findall(text)
    units = [part[-1] for part in parts]
    # Each unit once and the longest first, so that a slip such as 30m1h is not silently added up.
    if not parts or "".join(parts) != text or units != sorted(set(units), key="wdhms".index):
        raise ArgumentTypeError(f"not a duration: {text!r} (90 is seconds; 45s, 30m, 1h30m, 2d, HH:MM:SS)")
    return sum(float(part[:-1]) * _SECONDS[part[-1]] for part in parts)


def memory(text: str) -> float:
    """Return gigabytes: `16`, `16G`, `512M`, `1.5T`. As in Slurm, 1G is 1024M; `G`, `GB` and `GiB` are the same."""
    match = _MEMORY.fullmatch(text)
    if not match:
        raise ArgumentTypeError(f"not an amount of memory: {text!r} (16 is gigabytes; 512M, 16G, 1.5T)")
    return float(match[1]) * _GIGABYTES[match[2].upper()]


def whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise ArgumentTypeError(f"not a whole number: {text!r}")
    return int(text)


def count(text: str) -> int:
    """Return a whole number from 0 on."""
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ArgumentTypeError(f"a whole number from 0 on, not {text!r}")
    return int(text)


def nodes(text: str) -> tuple[int, int | None]:
    """Parse `4`, or `2:8` for a world that may grow from 2 to 8 nodes."""
    low, colon, high = text.partition(":")
    return whole(low), whole(high) if colon else None


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"expects KEY=VALUE, not {text!r}")
    return key, value


def command(text: str) -> tuple[str, ...]:
    """Return a command's words, quoted as in a shell. No shell runs it: `$` and `|` have no meaning."""
    import shlex

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentTypeError(f"not a command: {text!r} ({str(error).lower()})") from None
    if not words or not words[0]:
        raise ArgumentTypeError(f"not a command: {text!r} (it names no program)")
    return words


def axis(text: str) -> tuple[str, list[str]]:
    """Parse `NAME=V1,V2,…`. A value with a comma is in double quotes, as in CSV."""
    import csv

    name, values = key_value(text)
    try:
        return name, next(csv.reader([values], strict=True))
    except (csv.Error, StopIteration):
        raise ArgumentTypeError(f"expects NAME=V1,V2, not {text!r}") from None


def environment(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`, or `NAME` with its value in this environment."""
    import os

    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise ArgumentTypeError(f"{name} is not set here; give its value: --env {name}=VALUE")
    return name, os.environ[name]


def secret(text: str) -> tuple[str, str]:
    """Parse `NAME=REFERENCE`. The error message does not repeat the text, which may be the secret itself."""
    name, _, reference = text.partition("=")
    if not (name and _REFERENCE.fullmatch(reference)):
        raise ArgumentTypeError("expects NAME=REFERENCE, such as HF_TOKEN=env:HF_TOKEN or KEY=file:/run/key")
    return name, reference


def option(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE`, VALUE typed as in `accel.yaml`: 4 is a number, true is yes, [a, b] a list, "4" a word."""
    key, value = key_value(text)
    import json

    import yaml

    try:
        typed = yaml.safe_load(value)
        json.dumps(typed)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not YAML"
        raise ArgumentTypeError(f"the value of {key} is not a YAML value: {value!r} ({problem})") from None
    except TypeError:
        typed = value  # YAML made a date of it, which no target's options hold
    return key, typed
