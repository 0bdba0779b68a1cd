"""The argparse flags of `accel launch`, one for every setting of `accel.settings` that has a flag.

Names, defaults and meanings are Hugging Face Accelerate's where it has them
(https://huggingface.co/docs/accelerate/package_reference/cli), so that its command lines work unchanged.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from accel.settings import GROUPS as ALL
from accel.settings import Setting, defaults
from accel.settings.setting import BadValue, read, typed

GROUPS: dict[str, tuple[Setting, ...]] = {
    group.title: flags for group in ALL if (flags := tuple(setting for setting in group.settings if setting.flag))
}


def add_arguments(parser: argparse.ArgumentParser, *, defaults_too: bool = True) -> None:
    """Add every flag to `parser`, in its groups, spelled with `_` and with `-`.

    Without `defaults_too`, the parsed namespace holds only flags that were given, and only `_` is accepted:
    `accel.cli.arguments` treats both spellings alike.
    """
    if defaults_too:
        parser.set_defaults(**defaults())
    for group in ALL:
        if group.title in GROUPS:
            description = f"{group.description}\nExample: accel launch {group.example}"
            arguments = parser.add_argument_group(group.title, description)
            for setting in GROUPS[group.title]:
                spellings = setting.spellings()
                names = spellings if defaults_too else [name for name in spellings if "-" not in name[2:]]
                _add(arguments, setting, names, setting.default if defaults_too else argparse.SUPPRESS)


def _add(group: argparse._ArgumentGroup, setting: Setting, names: list[str], default: Any) -> None:
    common: dict[str, Any] = {"dest": setting.name, "help": _help(setting), "default": default}
    if setting.kind == "switch":
        group.add_argument(*names, action="store_true", **common)
    elif setting.kind == "words":
        group.add_argument(*names, action="append", metavar=setting.metavar, **common)
    else:
        group.add_argument(*names, type=_reader(setting), metavar=_metavar(setting), **common)


def _help(setting: Setting) -> str:
    parts = [setting.help]
    if setting.choices and _is_long(setting):
        parts.append(f"one of {', '.join(setting.choices)}")
    if setting.kind == "words":
        parts.append("repeatable")
    if setting.default not in (None, False, "", ()) and setting.kind != "yesnos":
        parts.append(f"default {typed(setting, setting.default)}")
    return "; ".join(parts).replace("%", "%%")


def _metavar(setting: Setting) -> str:
    if setting.metavar:
        return setting.metavar
    if setting.kind == "yesno":
        return "{true,false}"
    if setting.choices and not _is_long(setting):
        return "{" + ",".join(setting.choices) + "}"
    return "NAME" if setting.choices else setting.name.upper()


def _is_long(setting: Setting) -> bool:
    return sum(map(len, setting.choices)) > 40


def _reader(setting: Setting) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return read(setting, text)
        except BadValue as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
