"""Validation of a target's options. The target's `Options` dataclass is the only schema."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..convert import convert
from ..errors import ConfigError, SchedulerError, nearest

Path = tuple[str | int, ...]
# (path, of_key) -> the location of the value, or of its key, and the target: `accel.yaml:7: target lab`.
Locate = Callable[[Path, bool], str]

# Target options that the command line has flags for.
_FLAGS = ("hosts", "hostfile", "spares")

_AT = re.compile(r" - at `(key in )?\$(?P<path>[^`]*)`\Z")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `(?P<type>[^`]*)`(?P<limit>[^`]*), got `[^`]*`")


def make_options(
    schema: type, values: Mapping[str, Any], overrides: Mapping[str, Any], locate: Locate, *, kind: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Return the options, and those of them that are set as plain JSON values. Raises ConfigError.

    `overrides`, from the command line, take precedence; text in them may stand for a number, true or false.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in values:
        _refuse_unknown(key, fields, locate((key,), True))
    for key in overrides:
        if key not in fields:
            option_names = ", ".join(fields) or "none"
            owner = f"the {kind} target" if kind else "this target"
            raise ConfigError(
                f"{_flag(key)}: {owner} has no such option{nearest(key, fields)} (options: {option_names})"
            )
    merged = {**values, **overrides}
    required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in merged]
    if missing:
        raise ConfigError(f"{locate((), True)}: missing {', '.join(map(repr, missing))} (keys: {', '.join(fields)})")
    if not merged:  # the usual case, without the cost of importing the validator
        return _build(schema, {}, overrides, locate), {}
    merged |= _from_text(schema, overrides)
    options = _build(schema, merged, overrides, locate)
    for key, value in merged.items():
        _refuse_unknown_nested(value, getattr(options, key), (key,), overrides, locate)
    return options, _plain({key: getattr(options, key) for key in merged})


def _flag(key: str) -> str:
    return f"--{key}" if key in _FLAGS else f"--option {key}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they will be when read from a JSON file."""
    import msgspec

    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(values)))
    return plain


def _refuse_unknown(key: str, known: Mapping[str, Any], location: str) -> None:
    if key not in known:
        keys = ", ".join(known) or "none"
        raise ConfigError(f"{location}: unknown key {key!r}{nearest(key, known)} (keys: {keys})")


def _from_text(schema: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that are text and stand for another type, converted to it."""
    import msgspec

    types = typing.get_type_hints(schema)
    converted = {}
    for key, value in overrides.items():
        if isinstance(value, str):
            try:
                converted[key] = msgspec.to_builtins(convert(value, types[key], strict=False))
            except msgspec.ValidationError:
                continue  # reported, with its location, by `_build`
    return converted


def _build(schema: type, values: Mapping[str, Any], overrides: Mapping[str, Any], locate: Locate) -> Any:
    try:
        if not values:
            return schema()
        import msgspec

        try:
            return convert(dict(values), schema)
        except msgspec.ValidationError as error:
            problem = str(error)
    except SchedulerError as error:
        raise ConfigError(f"{locate((), True)}: {error}") from None
    raise _validation_error(schema, problem, values, overrides, locate)


def _validation_error(
    schema: type, problem: str, values: Mapping[str, Any], overrides: Mapping[str, Any], locate: Locate
) -> ConfigError:
    """Translate msgspec's message: the location, the expected value and the actual one."""
    match = _AT.search(problem)
    path = _steps(match["path"]) if match else ()
    message = problem[: match.start()] if match else problem
    message = _EXPECTED.sub(lambda m: f"expects {m['type'].replace(' | null', '')}{m['limit']}", message)
    if message.startswith("expects "):
        value = _value_at(values, path)
        message += f", got {'nothing' if value is None else f'{type(value).__name__} {value!r}'}"
        if message.startswith("expects str,") and isinstance(value, float):  # a version: 3.10 is read as 3.1
            message += "; put it in quotes"
    elif message.startswith("Invalid enum value"):
        message = f"expects {_choices(schema, path)}, got {_value_at(values, path)!r}"
    name = _dotted(path)
    if path and path[0] in overrides:
        return ConfigError(f"{_flag(name)}: {message}")
    return ConfigError(f"{locate(path, False)}: {f'{name}: ' if name else ''}{message}")


def _choices(schema: type, path: Path) -> str:
    hint = typing.get_type_hints(schema).get(str(path[0])) if len(path) == 1 else None
    options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not typing.Literal else [hint]
    choices: list[str] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            choices += [repr(choice) for choice in typing.get_args(option)]
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            choices += [repr(member.value) for member in option]
    return f"one of {', '.join(choices)}" if choices else "another value"


def _refuse_unknown_nested(raw: Any, converted: Any, path: Path, overrides: Mapping[str, Any], locate: Locate) -> None:
    """Raise ConfigError for an unknown key in a nested dataclass: the validator drops it silently."""
    if isinstance(raw, Mapping) and dataclasses.is_dataclass(converted):
        names = [f.name for f in dataclasses.fields(converted)]
        for key, value in raw.items():
            location = "--option" if path[0] in overrides else f"{locate((*path, key), True)}:"
            _refuse_unknown(key, dict.fromkeys(names), f"{location} {_dotted(path)}")
            _refuse_unknown_nested(value, getattr(converted, key), (*path, key), overrides, locate)
    elif isinstance(raw, Mapping) and isinstance(converted, Mapping):
        for key, value in raw.items():
            _refuse_unknown_nested(value, converted.get(key), (*path, key), overrides, locate)
    elif _is_list(raw) and _is_list(converted) and len(raw) == len(converted):
        for index, (value, converted_item) in enumerate(zip(raw, converted, strict=True)):
            _refuse_unknown_nested(value, converted_item, (*path, index), overrides, locate)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _steps(text: str) -> Path:
    steps = [m["key"] if m["key"] is not None else m["index"] for m in _STEP.finditer(text)]
    # msgspec writes `[...]` for some value of a mapping: the location is then the mapping's.
    known = steps[: steps.index("...")] if "..." in steps else steps
    return tuple(int(step) if step.isdigit() else step for step in known)


def _value_at(value: Any, path: Path) -> Any:
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _dotted(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
