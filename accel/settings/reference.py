"""The pages of `docs/reference`, generated from the schema.

`python -m accel.settings.reference docs/reference` writes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from . import GROUPS, Group, Setting
from .setting import LAUNCHERS, expected, typed

_GENERATED = "<!-- Generated from accel/settings by `python -m accel.settings.reference docs/reference`: edit that. -->"
_FLAGS = """\
# Flags of accel launch

{generated}

`accel launch [OPTIONS] SCRIPT [ARGUMENTS]`. A flag may be spelled with `_` or with `-`. Precedence: flag, environment
variable, scheduler, [configuration file](config-file.md), default. `accel launch --explain` prints every setting with
its source. The variable is the one in the program's environment.
"""
_FILE = """\
# The configuration file

{generated}

`accel launch` reads the file that `--config_file` names, else `default_config.yaml` in the folder `accelerate` of
`$HF_HOME`, else of `$XDG_CACHE_HOME/huggingface`, else of `~/.cache/huggingface`. It is Accelerate's file, in YAML or
JSON; [config.md](../config.md) says more. In a section, a key may leave out the section's prefix.
"""


def pages() -> dict[str, str]:
    """Return every page by its file name."""
    return {"launch-flags.md": _flags(), "config-file.md": _file()}


def write(folder: str) -> None:
    """Write the pages into `folder`. Raises OSError."""
    for name, text in pages().items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def _flags() -> str:
    parts = [_FLAGS.format(generated=_GENERATED)]
    for group in GROUPS:
        rows = [_flag_row(setting) for setting in group.settings if setting.flag]
        if rows:
            heading = ("flag", "value", "default", "variable", "used by", "")
            parts.append(_table(group, heading, rows, example=group.example))
    return "\n".join(parts)


def _flag_row(setting: Setting) -> tuple[str, ...]:
    name = f"`{setting.short}`, `{setting.display_name}`" if setting.short else f"`{setting.display_name}`"
    variable = f"`{setting.env}`" if setting.env else ""
    return (name, _values(setting), _default(setting), variable, _used_by(setting), setting.help)


def _file() -> str:
    parts = [_FILE.format(generated=_GENERATED)]
    for group in sorted(GROUPS, key=lambda group: bool(group.section)):
        rows = [_key_row(setting) for setting in group.settings if setting.file_key]
        if rows:
            parts.append(_table(group, ("key", "value", "default", "flag", ""), rows, section=group.section))
    return "\n".join(parts)


def _key_row(setting: Setting) -> tuple[str, ...]:
    flag = f"`{setting.display_name}`" if setting.flag else ""
    return (f"`{setting.file_key}`", _values(setting), _default(setting), flag, setting.help)


def _table(
    group: Group, heading: tuple[str, ...], rows: list[tuple[str, ...]], *, section: str = "", example: str = ""
) -> str:
    lines = [(f"Section `{section}`. " if section else "") + group.description]
    lines += ["", f"    accel launch {example}"] if example else []
    return "\n".join([f"## {group.title}", "", *lines, "", *_lines(heading, rows), ""])


def _lines(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    for row in (heading, tuple("---" for _ in heading), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    return "" if setting.kind == "switch" else expected(setting)


def _default(setting: Setting) -> str:
    if setting.default in (None, "") or setting.kind == "switch":
        return ""
    return f"`{typed(setting, setting.default)}`"


def _used_by(setting: Setting) -> str:
    return ", ".join(LAUNCHERS[name] for name in setting.used_by)


if __name__ == "__main__":
    write(sys.argv[1])
