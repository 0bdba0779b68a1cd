"""Split a command line into a command's own options and the other words.

argparse cannot do it: with `REMAINDER` it drops a `--` that belongs to the script, and otherwise it treats
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
    multi_value: Collection[str] = (),
    optional_value: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Return a command's own options, each as one word (`--name=value` or `--flag`), and all other words.

    options:         every option -> True if it has a value; `-` and `_` in a name are the same.
    first_word_ends: True to return the first word that is not an option, and all that follow, untouched. A `--` before
                     that word marks it as no option and is dropped; any later one is kept.
    multi_value:     options with one or more values, up to the next option; returned as `--name=a --name=b`.
    optional_value:  options whose value is optional, and then follows a `=` only.

    Raises UsageError for an unknown option, a missing value and an unexpected one.
    """
    known = {_dashed(spelling): spelling for spelling in options}
    own_options: list[str] = []
    positionals: list[str] = []
    remaining = iter(argv)
    open_option = ""
    for argument in remaining:
        if open_option and argument[:1] != "-":
            own_options.append(f"{open_option}={argument}")
            continue
        open_option = ""
        if argument == "--":
            return own_options, [*positionals, *remaining]
        if len(argument) < 2 or argument[0] != "-":
            if first_word_ends:
                return own_options, [argument, *remaining]
            positionals.append(argument)
        else:
            spelled, equals, value = argument.partition("=")
            name = known.get(_dashed(spelled))
            if name is None:
                from schedulers.hints import hint

                suggestion = hint(_dashed(spelled), options, command)
                raise UsageError(command, f"unknown option {spelled!r}{suggestion} ({command} --help lists them)")
            if options[name] and (equals or name not in optional_value):
                own_options.append(f"{name}={value if equals else _next_value(command, known, name, remaining)}")
                open_option = name if name in multi_value and not equals else ""
            elif equals:
                raise UsageError(command, f"{name} takes no value: write it without {equals + value!r}")
            else:
                own_options.append(name)
    return own_options, positionals


def _next_value(command: str, known: Mapping[str, str], name: str, remaining: Iterator[str]) -> str:
    argument = next(remaining, None)
    if argument is None:
        raise UsageError(command, f"{name} needs a value")
    if argument == "--" or _dashed(argument) in known:
        raise UsageError(command, f"{name} needs a value (if {argument!r} is the value: {name}={argument})")
    return argument


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
