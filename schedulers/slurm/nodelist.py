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
    names = [name for word in _words(text) for name in _names(word, text)]
    if len(names) > _LIMIT:
        raise SpecError(f"node list {text[:60]!r}… stands for {len(names)} nodes")
    return names


def _words(text: str) -> list[str]:
    """Split the text at the commas outside brackets."""
    words, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _refusal(text, "its brackets do not match")
        if letter == "," and not depth:
            words.append(text[begin:at])
            begin = at + 1
    words.append(text[begin:])
    if depth:
        raise _refusal(text, "its brackets do not match")
    if not all(words):
        raise _refusal(text, "a name is missing")
    return words


def _names(word: str, text: str) -> list[str]:
    parts = _PART.findall(word)
    if "".join(parts) != word:
        raise _refusal(text, f"{word!r} is no name")
    names = [""]
    for part in parts:
        values = _values(part, text) if part.startswith("[") else [part]
        if len(names) * len(values) > _LIMIT:
            raise _refusal(text, "it stands for too many nodes")
        names = [name + value for name in names for value in values]
    return names


def _values(bracket: str, text: str) -> list[str]:
    values: list[str] = []
    for item in bracket[1:-1].split(","):
        found = _RANGE.match(item)
        if found is None:
            raise _refusal(text, f"{item!r} is no range of numbers")
        first, last = found["first"], found["last"] or found["first"]
        if int(last) < int(first) or int(last) - int(first) > _LIMIT:
            raise _refusal(text, f"{item!r} is no range of numbers")
        values += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return values


def _refusal(text: str, why: str) -> SpecError:
    return SpecError(f"not a list of Slurm's nodes: {text[:80]!r}: {why}")
