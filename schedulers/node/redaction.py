"""Replacement of secrets' values by their names in messages. Runs on hosts too, with the supervisor."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SHORTEST = 4  # any text may hold a shorter value


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Return the text with the values of secrets (by name) replaced by `(secret NAME)`.

    Of a value with several lines, each line is replaced, whether plain or escaped as in Python, JSON, a URL or a
    shell. Values of fewer than 4 characters stay.
    """
    import re

    names = {
        line: name for name, value in secrets.items() for line in (value, *value.splitlines()) if len(line) >= _SHORTEST
    }
    lines = sorted(names, key=len, reverse=True)
    if not lines:
        return text
    pattern = "|".join("({})".format("".join(map(_forms, line))) for line in lines)
    return re.sub(pattern, lambda match: f"(secret {names[lines[(match.lastindex or 1) - 1]]})", text)


def _forms(char: str) -> str:
    """Return a pattern for a character as it is and as it is escaped."""
    import json
    import re
    from urllib.parse import quote

    if char.isascii() and char.isalnum():
        return char
    forms = {repr(char)[1:-1], json.dumps(char)[1:-1], f"\\u{ord(char):04x}", f"\\{char}"}
    forms.add(quote(char, safe="", errors="surrogateescape"))
    forms |= {" ": {"+"}, "'": {"'\"'\"'", "'\\''"}}.get(char, set())
    escaped = "|".join(re.escape(form) for form in sorted(forms - {char}, key=len, reverse=True))
    return f"(?:{re.escape(char)}|(?i:{escaped}))"
