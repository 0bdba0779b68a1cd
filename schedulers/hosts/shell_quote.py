"""An argv as data for a host with an unknown shell. Nothing is quoted anywhere else.

The user's shell (which may be any) gets only the line of `loader`. The command itself follows as the first bytes of
standard input, quoted for `/bin/sh`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import SpecError


def loader(length: int) -> str:
    """Return the command line for a script of `length` bytes, which csh, fish and zsh read like sh."""
    return f"exec /bin/sh -c 'eval \"$(head -c {length})\"'"


def script(argv: Sequence[str], mark: str) -> bytes:
    """Return the script for `/bin/sh`, which runs the program `argv[0]`, never a shell's built-in.

    It first writes `mark` (on a line of its own) to both outputs, to separate the output of start-up files from
    that of the command. Raises SpecError for what no process accepts: an empty argv, a null character.
    """
    if not argv or not argv[0] or argv[0].startswith("-"):
        raise SpecError(f"{argv[0] if argv else '(nothing)'!r} is not a program that a host can run")
    lines = [f"printf '\\n{mark}\\n'; printf '\\n{mark}\\n' >&2".encode()]
    lines.append(b"(exec " + b" ".join(quote(argument) for argument in argv) + b")")
    lines.append(b"exit $?")
    return b"\n".join(lines)


def quote(word: str) -> bytes:
    """Quote the word for `/bin/sh`; bytes that are not UTF-8 (surrogate escapes) are preserved."""
    raw = os.fsencode(word)
    if b"\0" in raw:
        raise SpecError(f"no process can be given a null character: {word!r}")
    return b"'" + raw.replace(b"'", b"'\\''") + b"'"
