"""Split a command line into a command's own options and the other words.

argparse cannot do it: with `REMAINDER` it drops a `--` that belongs to the script, and without it it treats
the script's options as its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence


class UsageError(Exception):
    """The command line is wrong. The message is one line with the remedy."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(message)
        self.command = command


def split(
    command: str,
    options: Mapping[str, bool],
    argv: Sequence[str],
    *,
    first_word_ends: bool,
    many: Collection[str] = (),
    maybe: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Return a command's own options, each as one word (`--name=value` or `--flag`), and all other words.

    options:         every option -> True if it has a value; `-` and `_` in a name are the same.
    first_word_ends: return the first word that is not an option, and all that follow it, untouched. A `--` before
                     that word marks it as no option and is dropped; any later one is kept.
    many:            options with one or more values, up to the next option: `--name=a --name=b`.
    maybe:           options whose value is optional, and then follows a `=` only.

    Raises UsageError for an unknown option, a missing value and an unexpected one.
    """
    known = {_dashed(spelling): spelling for spelling in options}
    own: list[str] = []
    words: list[str] = []
    rest = iter(argv)
    open_option = ""
    for word in rest:
        if open_option and word[:1] != "-":
            own.append(f"{open_option}={word}")
            continue
        open_option = ""
        if word == "--":
            return own, [*words, *rest]
        if len(word) < 2 or word[0] != "-":
            if first_word_ends:
                return own, [word, *rest]
            words.append(word)
        else:
            spelled, equals, value = word.partition("=")
            name = known.get(_dashed(spelled))
            if name is None:
                from schedulers.errors import nearest

                near = nearest(_dashed(spelled), options)
                raise UsageError(command, f"unknown option {spelled!r}{near} ({command} --help lists them)")
            if options[name] and (equals or name not in maybe):
                own.append(f"{name}={value if equals else _next_word(command, known, name, rest)}")
                open_option = name if name in many and not equals else ""
            elif equals:
                raise UsageError(command, f"{name} takes no value, so write it without {equals + value!r}")
            else:
                own.append(name)
    return own, words


def _next_word(command: str, known: Mapping[str, str], name: str, rest: Iterator[str]) -> str:
    word = next(rest, None)
    if word is None:
        raise UsageError(command, f"{name} needs a value")
    if word == "--" or _dashed(word) in known:
        raise UsageError(command, f"{name} needs a value (if {word!r} is the value: {name}={word})")
    return word


def _dashed(option: str) -> str:
    """Return the option with `-` for `_`: `--num_processes` and `--num-processes` are one option."""
    return option.replace("_", "-") if option.startswith("--") else option


def columns() -> int:
    """Return the width of help texts: the terminal's, from 40 to 120 columns; 100 without a terminal."""
    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
    except (OSError, ValueError):
        width = 0
    return max(40, min(width or 100, 120))


def hanging(term: str, text: str, indent: int) -> str:
    """Format a term with its text from column `indent` on, or below the term on a narrow terminal."""
    width = columns()
    indent = indent if width >= 60 else min(indent, width // 3)
    head = f"  {term}".ljust(indent) if len(term) + 3 <= indent else f"  {term}\n{' ' * indent}"
    if indent + len(text) <= width:
        return head + text
    import textwrap

    return head + f"\n{' ' * indent}".join(textwrap.wrap(text, width - indent, break_on_hyphens=False))
