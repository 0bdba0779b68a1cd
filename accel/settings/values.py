"""Values of a setting: valid ones, parsing from words and files, and the form for a worker."""

from __future__ import annotations

from typing import Any

from .setting import Setting

_TRUE = ("true", "yes", "y", "t", "on", "1")
_FALSE = ("false", "no", "n", "f", "off", "0")
_SAID = {
    "whole": "a whole number from 0 on",
    "positive": "a whole number from 1 on",
    "number": "a number from 0 on",
    "seconds": "a number of seconds",
    "yesno": "true or false",
    "switch": "true or false",
    "yesnos": "three of true or false with commas between them",
    "words": "a list of words",
    "table": "names and values",
}


class BadValue(ValueError):
    """An invalid value of a setting. The message lists what is valid, without the setting's name."""


def read(setting: Setting, raw: object) -> Any:
    """Parse a word of the command line or environment, or a value of a YAML file.

    Raises BadValue.
    """
    if raw is None:
        raise _bad(setting, raw)
    if isinstance(raw, str) and raw.strip().lower() in setting.also:
        return raw.strip().lower()
    if setting.kind in ("whole", "positive", "number", "seconds"):
        return _chosen_number(setting, _number(setting, raw))
    if setting.kind in ("yesno", "switch"):
        return _yesno(setting, raw)
    if setting.kind == "yesnos":
        return _yesnos(setting, raw)
    if setting.kind == "words":
        return _words(setting, raw)
    if setting.kind == "table":
        if not isinstance(raw, dict):
            raise _bad(setting, raw)
        return raw
    return _text(setting, raw)


def written(setting: Setting, value: Any) -> str:
    """Return the value as the worker reads it in the environment."""
    text = str(value)
    if setting.style == "lower":
        return text.lower()
    if setting.style == "upper":
        return text.upper()
    return "1" if setting.style == "one" and value is True else text


def typed(setting: Setting, value: Any) -> str:
    """Return the value as a word of the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(str(part).lower() if isinstance(part, bool) else str(part) for part in value)
    return str(value)


def expected(setting: Setting) -> str:
    """Describe the valid values."""
    said = ", ".join(setting.choices) if setting.choices else _SAID.get(setting.kind, "text")
    return ", or ".join((said, *setting.also))


def as_written(raw: object) -> str:
    """Return a value of a file or command line as messages show it, not in Python's spelling."""
    if isinstance(raw, (bool, int, float, list, tuple, dict)) or raw is None:
        import json

        return json.dumps(raw, default=str, ensure_ascii=False)
    return repr(raw) if isinstance(raw, str) else str(raw)


def _text(setting: Setting, raw: object) -> str:
    if isinstance(raw, (dict, list, tuple)):
        raise _bad(setting, raw)
    text = raw if isinstance(raw, str) else str(raw)
    if not setting.choices:
        return text
    if isinstance(raw, bool):  # YAML takes `no` for false
        text = text.lower() if text.lower() in setting.choices else "yes" if raw else "no"
    spelled = {choice.lower(): choice for choice in setting.choices}
    spelled |= {alias.lower(): meaning for alias, meaning in setting.aliases}
    try:
        return spelled[text.lower()]
    except KeyError:
        from accel.errors import nearest

        near = nearest(text.lower(), spelled)
        raise BadValue(f"{as_written(raw)} is not one of {', '.join(setting.choices)}{near}") from None


def _number(setting: Setting, raw: object) -> int | float:
    text = raw.strip() if isinstance(raw, str) else "" if isinstance(raw, bool) else str(raw)
    if setting.kind in ("whole", "positive"):
        if text.isascii() and text.isdigit() and (int(text) or setting.kind == "whole"):
            return int(text)
        raise _bad(setting, raw)
    try:
        number = float(text)
    except ValueError:
        raise _bad(setting, raw) from None
    if not 0 <= number < float("inf"):
        raise _bad(setting, raw)
    return number


def _chosen_number(setting: Setting, value: int | float) -> int | float:
    if setting.choices and str(value) not in setting.choices:
        raise BadValue(f"{value} is not one of {', '.join(setting.choices)}")
    return value


def _yesno(setting: Setting, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise _bad(setting, raw)


def _yesnos(setting: Setting, raw: object) -> tuple[bool, ...]:
    parts = raw.strip(" ()[]").split(",") if isinstance(raw, str) else raw
    if isinstance(parts, bool):
        parts = [parts] * 3
    if not isinstance(parts, (list, tuple)) or len(parts) != 3:
        raise _bad(setting, raw)
    return tuple(_yesno(setting, part) for part in parts)


def _words(setting: Setting, raw: object) -> list[str]:
    if isinstance(raw, str):
        return [raw] if raw else []
    if not isinstance(raw, (list, tuple)) or any(isinstance(part, (dict, list)) for part in raw):
        raise _bad(setting, raw)
    return [str(part) for part in raw if str(part)]


def _bad(setting: Setting, raw: object) -> BadValue:
    if setting.choices:
        return BadValue(f"{as_written(raw)} is not one of {', '.join(setting.choices)}")
    return BadValue(f"{expected(setting)}, not {as_written(raw)}")
