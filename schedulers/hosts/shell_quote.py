"""An argv as data for a host with an unknown shell. Nothing is quoted anywhere else.

The user's shell (which may be any) gets only the line of `loader`. The command itself, its environment and
its directory follow as the first bytes of standard input, quoted for `/bin/sh`: they appear in no process
table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..errors import SpecError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NO_DIRECTORY = 125


def loader(length: int) -> str:
    """Return the command line for a script of `length` bytes, which csh, fish and zsh read like sh."""
    return f"exec /bin/sh -c 'eval \"$(head -c {length})\"'"


def script(argv: Sequence[str], env: Mapping[str, str], directory: str | None, mark: str) -> bytes:
    """Return the script for `/bin/sh`, which runs the program `argv[0]`, never a shell's built-in.

    It first writes `mark` (on a line of its own) to both outputs, to separate the output of start-up files from
    that of the command. Raises SpecError for what no process accepts: an empty argv, a null character, an odd
    variable name.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SpecError(f"{argv[0] if argv else '(nothing)'!r} is not a program that a host can run")
    lines = [f"printf '\\n{mark}\\n'; printf '\\n{mark}\\n' >&2".encode()]
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise SpecError(f"{name!r} is not a name for an environment variable")
        lines.append(b"export " + name.encode() + b"=" + quote(value))
    if directory is not None:
        lines.append(b"CDPATH= cd -- " + quote(directory) + b" || exit %d" % NO_DIRECTORY)
    lines.append(b"(exec " + b" ".join(quote(argument) for argument in argv) + b")")
    lines.append(b"exit $?")
    return b"\n".join(lines)


def quote(word: str) -> bytes:
    """Quote the word for `/bin/sh`; bytes that are not UTF-8 (surrogate escapes) are preserved."""
    raw = os.fsencode(word)
    if b"\0" in raw:
        raise SpecError(f"no process can be given a null character: {word!r}")
    return b"'" + raw.replace(b"'", b"'\\''") + b"'"
