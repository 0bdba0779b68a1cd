"""Redaction of secrets in settings and variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "(set, not shown)"
_MIN_LENGTH = 6  # characters of a secret that is searched for in other texts

_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|passwd|credential|api_?key|access_?key|private_?key|auth|cookie|signature"
    r"|pass$|pwd$|(?:^|[_-])sig$|_key$|^key$|_pat$|^pat$|webhook|connection_?string|dsn",
    re.IGNORECASE,
)
# Names that only look secret: a number of tokens, an authentication mode, an author, PyTorch's forward pass, $PWD.
_HARMLESS = re.compile(
    r"(?:^|_)(num|max|min|per|n)_?tokens?|tokens?_(per|length|dim)|tokeniz|_calculate_per_token_loss$|authn?_?mode|author"
    r"|(?:^|_)(?:by|com|tres|sur|(?:back|for)ward_?)pass$|^(?:old)?pwd$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|glpat-[\w-]{16,})"
)
# As in `schedulers.printable`: a password may hold a slash, and digits before it may be a host's port.
_IN_URL = re.compile(r"(?<=://)(?:[^/?#\s]+|([^/?#@:\s[]+:)\d*[/?#]\S*|[^/?#@:\s[]+:\S*)(?=@)")
_USER_AND_PASSWORD = re.compile(r"(?<![\w:.-])(?P<user>[\w.-]+):(?P<password>[^\s:@/'\"]+)(?=@)")
_VALUE = r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s;&|'\"]+)"
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_][\w-]*)(?P<between>=|:\s)" + _VALUE)
_OPTION = re.compile(r"(?<!\w)(?P<name>--?[A-Za-z][\w-]*)(?P<between>\s+)" + _VALUE)
# `curl -u me:word`, but not the numbers of `docker run -u 1000:1000`; `docker login -p word`.
_USER_OPTION = re.compile(
    r"(?P<before>(?<!\S)(?:-u|-U|--user|--proxy-user)[\s=]*(?!\d+:\d+(?:\s|$))(?P<quote>['\"])?[^\s:'\"]+:)(?!//)"
    r"(?(quote)[^'\"]*|(?:'[^']*'|\"[^\"]*\"|[^\s;&|'\"]+))"
)
_LOGIN = re.compile(r"(?P<before>\b(?:login|sshpass)\b[^;&|\n]*?\s-p[\s=]*)" + _VALUE)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")


def is_secret(name: str) -> bool:
    """Return True if a setting's name suggests a secret; errs on the side of True."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS.search(name)


def secrets_of(value: Any, name: str = "") -> frozenset[str]:
    """Return the texts in ``value`` (nested plain values) whose names suggest secrets, except very short ones."""
    if isinstance(value, Mapping):
        return frozenset(text for key, item in value.items() for text in secrets_of(item, f"{key}"))
    if isinstance(value, (list, tuple)):
        return frozenset(text for item in value for text in secrets_of(item, name))
    return frozenset({value} if isinstance(value, str) and len(value) >= _MIN_LENGTH and is_secret(name) else ())


def without_secrets(value: Any, name: str = "", *, known: Collection[str] = ()) -> Any:
    """Return ``value`` (nested plain values) with every secret replaced; keys and list lengths are kept.

    known: secrets to remove wherever they appear.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(item, f"{key}", known=known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item, name, known=known) for item in value]
    if value is None or value == "" or isinstance(value, bool):
        return value
    if name and is_secret(name):
        return HIDDEN
    return value if isinstance(value, (int, float)) else _text_without_secrets(f"{value}", known)


def _text_without_secrets(text: str, known: Collection[str]) -> str:
    passwords = [match["password"] for match in _USER_AND_PASSWORD.finditer(text)]
    for secret in sorted({*known, *passwords}, key=len, reverse=True):
        text = text.replace(secret, "…")
    text = _SHAPES.sub("…", _IN_URL.sub(r"\1…", text))
    text = _LOGIN.sub(r"\g<before>…", _USER_OPTION.sub(r"\g<before>…", text))
    text = _BEARER.sub(lambda match: f"{match[1]} …", text)
    return _OPTION.sub(_hide_value, _ASSIGNED.sub(_hide_value, text))


def _hide_value(match: re.Match[str]) -> str:
    secret = is_secret(match["name"].strip("-").replace("-", "_"))
    return f"{match['name']}{match['between']}…" if secret else match[0]
