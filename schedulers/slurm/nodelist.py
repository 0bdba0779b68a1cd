"""Slurm's compressed node lists, `gpu[01-03,07],login`, without `scontrol`, which containers lack."""

from __future__ import annotations

import re

from ..errors import SpecError

_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?\Z")
_LIMIT = 1 << 17


def expand(text: str) -> list[str]:
    """Return the names in `text`, in its order, as `scontrol show hostnames` prints them.

    Numbers keep the width of the first of their range. Several brackets in one name vary as digits do, the last
    one fastest. Raises SpecError for an invalid list.
    """
    names = [name for token in _split_commas(text) for name in _names(token, text)]
    if len(names) > _LIMIT:
        raise SpecError(f"node list {text[:60]!r}… has {len(names)} nodes, more than {_LIMIT}")
    return names


def _split_commas(text: str) -> list[str]:
    """Split the text at the commas outside brackets."""
    tokens, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _parse_error(text, "its brackets do not match")
        if char == "," and not depth:
            tokens.append(text[start:index])
            start = index + 1
    tokens.append(text[start:])
    if depth:
        raise _parse_error(text, "its brackets do not match")
    if not all(tokens):
        raise _parse_error(text, "a name is missing")
    return tokens


def _names(token: str, text: str) -> list[str]:
    parts = _PART.findall(token)
    if "".join(parts) != token:
        raise _parse_error(text, f"{token!r} is not a name")
    names = [""]
    for part in parts:
        values = _values(part, text) if part.startswith("[") else [part]
        if len(names) * len(values) > _LIMIT:
            raise _parse_error(text, "it has too many nodes")
        names = [name + value for name in names for value in values]
    return names


def _values(bracket: str, text: str) -> list[str]:
    values: list[str] = []
    for item in bracket[1:-1].split(","):
        match = _RANGE.match(item)
        if match is None:
            raise _parse_error(text, f"{item!r} is not a range of numbers")
        first, last = match["first"], match["last"] or match["first"]
        if int(last) < int(first) or int(last) - int(first) > _LIMIT:
            raise _parse_error(text, f"{item!r} is not a range of numbers")
        values += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return values


def _parse_error(text: str, problem: str) -> SpecError:
    return SpecError(f"not a list of Slurm's nodes: {text[:80]!r}: {problem}")
