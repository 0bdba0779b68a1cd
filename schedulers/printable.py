"""Text from programs, hosts and servers, made safe to print: no terminal escapes, no control characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import re

# ECMA-48: control sequences (ESC [ …), strings (ESC ] … and four others, up to BEL or ST), other escapes; the same
# with the single characters of C1. A string without its end is left to _CONTROL: it would swallow the rest of the text.
_ESCAPE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[PX\]^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
)
# C0 and C1 except line feed and tab; Unicode's line separators, and its direction marks, which make a terminal
# reorder text.
_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"

# Up to the last @ before the path; or, after a name and a colon, up to the last @ before a space: a password may hold a
# slash. Digits and a slash may be a port and a path, too.
_USER = r"(?<=://)(?:[^/?#\s]*@|([^/?#@:\s[]+:)\d*[/?#]\S*(?=@)|[^/?#@:\s[]+:\S*@)"


def printable(text: str) -> str:
    r"""Return the text without terminal escapes; other control characters except line feed and tab become `\xNN`."""
    if text.isascii() and text.isprintable():
        return text
    import re  # imported when needed: most text is plain

    return re.sub(_CONTROL, _escaped, re.sub(_ESCAPE, "", text.replace("\r\n", "\n")))


def without_password(text: str) -> str:
    """Return the text without the user names and passwords of the URLs in it.

    `NAME:12/x@y` is a host with port and path, or a user and a password with a slash: it becomes `NAME:…@y`.
    """
    if "@" not in text:
        return text
    import re

    return re.sub(_USER, lambda match: f"{match[1]}…" if match[1] else "", text)


def one_line(text: str) -> str:
    """Return the printable text with its lines joined by spaces."""
    return " ".join(printable(text).splitlines())


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
