"""An argparse parser without abbreviations, with `-` and `_` alike, and with one-line errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import argv as words
from .argv import UsageError


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        # Without a width argparse imports shutil, with three compression libraries, each time an option is added.
        width = words.columns() - 2
        super().__init__(prog, **{"width": width, "max_help_position": 30 if width >= 60 else 8} | kwargs)


class Parser(argparse.ArgumentParser):
    """The parser of one command. Arguments are read with `read` or `read_before_script`, not `parse_args`."""

    def __init__(self, name: str, summary: str, examples: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=f"accel {name}",
            usage=usage,
            description=f"{summary}.",
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse options and words in any order. Raises UsageError."""
        own, positional = words.split(
            self.prog, self._takes_value(), argv, first_word_ends=False, many=self._with("+"), maybe=self._with("?")
        )
        return self.parse_args([*own, "--", *positional] if positional else own)

    def read_before_script(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options before the script; return them, and the script with all after it untouched."""
        own, script = words.split(self.prog, self._takes_value(), argv, first_word_ends=True, maybe=self._with("?"))
        return self.parse_args(own), script

    def error(self, message: str) -> NoReturn:
        raise UsageError(self.prog, message.removeprefix("argument ").replace(" with argument ", " with "))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # `--help | head -1` breaks the pipe here, where `main` sees it
        super().exit(status, message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and action.nargs is None:  # up to Python 3.12 argparse drops a value that is `--`
            value = self._get_value(action, arg_strings[0])
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _takes_value(self) -> dict[str, bool]:
        return {spelling: action.nargs != 0 for spelling, action in self._option_string_actions.items()}

    def _with(self, nargs: str) -> list[str]:
        return [spelling for spelling, action in self._option_string_actions.items() if action.nargs == nargs]
