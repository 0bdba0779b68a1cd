"""An argv as data for a host whose shell is not known: the one place where anything is quoted.

What sshd hands to the user's shell (which may be any) is `LOADER` and a number. The command itself, its environment and
its directory follow as the first bytes of standard input, quoted for `/bin/sh`: they stand in no process table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..errors import SpecError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NO_DIRECTORY = 125


def loader(length: int) -> str:
    """The command line for a script of `length` bytes. No character of it means anything else to csh, fish or zsh."""
    return f"exec /bin/sh -c 'eval \"$(head -c {length})\"'"


def script(argv: Sequence[str], env: Mapping[str, str], directory: str | None, mark: str) -> bytes:
    """What `/bin/sh` is to run: it writes `mark` (on a line of its own) to both outputs, so that what start-up files
    printed can be told from what the command prints, and then runs the program `argv[0]`, never a shell's built-in.

    Raises SpecError for what no process can be given: an empty argv, a null character, an odd variable name.
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
    lines.append(b"(exec " + b" ".join(quote(word) for word in argv) + b")")
    lines.append(b"exit $?")
    return b"\n".join(lines)


def quote(word: str) -> bytes:
    """The word for `/bin/sh`: bytes that are not UTF-8 (surrogate escapes) come out as they were."""
    raw = os.fsencode(word)
    if b"\0" in raw:
        raise SpecError(f"no process can be given a null character: {word!r}")
    return b"'" + raw.replace(b"'", b"'\\''") + b"'"
