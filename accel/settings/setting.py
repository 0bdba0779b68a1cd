"""Setting: one row of the schema, and how its values are read, checked and written.

Named tuples, not dataclasses: `accel launch --help` makes about 200 rows and must start nearly as fast as
Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# The readers of a setting.
ALL = ("all",)
LAUNCHERS = {
    "all": "every launch",
    "gang": "several processes",
    "deepspeed": "DeepSpeed",
    "fsdp": "FSDP",
    "megatron": "Megatron-LM",
    "parallelism": "combined parallelism",
    "fp8": "FP8",
    "dynamo": "torch.compile",
    "tpu": "a TPU",
    "pod": "a TPU pod",
    "mpi": "mpirun",
    "sagemaker": "Amazon SageMaker",
}

# The kinds of values, and the valid ones as messages and pages name them.
KINDS = {
    "text": "text",
    "whole": "a whole number of 0 or more",
    "positive": "a whole number of 1 or more",
    "number": "a number of 0 or more",
    "seconds": "a number of seconds",
    "yesno": "true or false",
    "switch": "true or false",
    "yesnos": "three of true or false with commas between them",
    "words": "a list of words",
    "table": "names and values",
}


class Setting(NamedTuple):
    """One setting.

    name:     of the flag, and of the value everywhere in the program.
    kind:     one of `KINDS`.
    default:  the value if not given; None is "not given".
    choices:  the allowed values, regardless of case; passed on in the spelling here.
    aliases:  other spellings of values, from older versions, with their values.
    also:     words allowed besides the values of the kind.
    env:      its variable in the worker, or "".
    style:    form of the variable: `str`, `lower`, `upper`, or `one` (1 if true, unset if false).
    key:      its name in the file if different; "-" for none.
    used_by:  some of `LAUNCHERS`.
    flag:     True if the command line has it.
    spelling: the flag's name if different.
    when:     (setting, value): required for an effect; a number is a minimum.
    """

    name: str
    help: str
    kind: str = "text"
    default: Any = None
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    short: str = ""
    metavar: str = ""
    env: str = ""
    style: str = "str"
    key: str = ""
    used_by: tuple[str, ...] = ALL
    flag: bool = True
    spelling: str = ""
    when: tuple[str, Any] | None = None

    def spellings(self) -> list[str]:
        """Return the flag's spellings: short, with `_`, with `-`."""
        name = self.spelling or self.name
        long = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        return [*([self.short] if self.short else []), *long]

    @property
    def display_name(self) -> str:
        """The flag as written in messages and pages; without a flag, the key in the file."""
        return f"--{self.spelling or self.name}" if self.flag else self.file_key

    @property
    def file_key(self) -> str:
        """The name in the configuration file, or ""."""
        return "" if self.key == "-" else self.key or self.name


class Group(NamedTuple):
    """A group of settings: a heading of `--help`, a page, and possibly a section of the file.

    section: the section of the file that holds them; "" is the file itself.
    prefix:  a part of the names that keys in that section may omit.
    example: the arguments of an `accel launch` line that uses it; "" without flags.
    on:      (setting, value) required for the others to have an effect, or None.
    """

    title: str
    description: str
    settings: tuple[Setting, ...]
    section: str = ""
    prefix: str = ""
    on: tuple[str, Any] | None = None
    example: str = ""


def switch(name: str, help: str, **fields: Any) -> Setting:
    """Return a setting that is off by default."""
    return Setting(name, help, "switch", False, **fields)


# Values: read from a command line, a variable or a file, and written for a worker.

_TRUE = ("true", "yes", "y", "t", "on", "1")
_FALSE = ("false", "no", "n", "f", "off", "0")


class BadValue(ValueError):
    """An invalid value of a setting. The message lists what is valid, without the setting's name."""


def read(setting: Setting, raw: object) -> Any:
    """Parse a word of the command line or environment, or a value of a YAML file. Raises BadValue."""
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
        return _as_list(setting, raw)
    if setting.kind == "table":
        if not isinstance(raw, dict):
            raise _bad(setting, raw)
        return raw
    return _text(setting, raw)


def env_text(setting: Setting, value: Any) -> str:
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
    description = ", ".join(setting.choices) if setting.choices else KINDS[setting.kind]
    return ", or ".join((description, *setting.also))


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

        suggestion = nearest(text.lower(), spelled)
        raise BadValue(f"{as_written(raw)} is not one of {', '.join(setting.choices)}{suggestion}") from None


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


def _as_list(setting: Setting, raw: object) -> list[str]:
    if isinstance(raw, str):
        return [raw] if raw else []
    if not isinstance(raw, (list, tuple)) or any(isinstance(part, (dict, list)) for part in raw):
        raise _bad(setting, raw)
    return [str(part) for part in raw if str(part)]


def _bad(setting: Setting, raw: object) -> BadValue:
    if setting.choices:
        return BadValue(f"{as_written(raw)} is not one of {', '.join(setting.choices)}")
    return BadValue(f"expects {expected(setting)}, not {as_written(raw)}")
