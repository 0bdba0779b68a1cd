"""Validation of a target's options. The target's `Options` dataclass is the only schema."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..convert import convert
from ..errors import ConfigError, OptionError, SchedulerError
from ..hints import hint

Path = tuple[str | int, ...]
# (path, of_key) -> the location of the value, or of its key, and the target: `accel.yaml:7: target lab`.
Locate = Callable[[Path, bool], str]

Spelling = Callable[[Path], str | None]  # of an unquoted scalar in the file

# YAML 1.1's words, which YAML 1.2 reads as text.
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+\Z")

# Target options that the command line has flags for.
_FLAGS = ("hosts", "hostfile", "spares")

_AT = re.compile(r" - at `(key in )?\$(?P<path>[^`]*)`\Z")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `(?P<type>[^`]*)`(?P<limit>[^`]*), got `[^`]*`")


def make_options(
    schema: type, values: Mapping[str, Any], overrides: Mapping[str, Any], locate: Locate, *, kind: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Return the options, and those of them that are set as plain JSON values. Raises ConfigError.

    `overrides`, from the command line, take precedence; text in them may stand for a number, true or false. A field
    with the metadata `rest`, a mapping, takes the options that the schema does not name.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}
    rest = next((name for name, f in fields.items() if f.metadata.get("rest")), None)
    if rest is not None:
        values = _with_rest(values, fields, rest, {})
        overrides = _with_rest(overrides, fields, rest, values.get(rest, {}))
    for key in values:
        _refuse_unknown(key, fields, locate((key,), True), kind, "target")
    for key in overrides:
        if key not in fields:
            option_names = ", ".join(fields) or "none"
            owner = f"the {kind} target" if kind else "this target"
            raise ConfigError(
                f"{_flag(key)}: {owner} has no such option{hint(key, fields, kind, 'target')} (options: {option_names})"
            )
    merged = {**values, **overrides}
    required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in merged]
    if missing:
        raise ConfigError(f"{locate((), True)}: missing {', '.join(map(repr, missing))}")
    if not merged:  # the usual case, without the cost of importing the validator
        return _build(schema, {}, overrides, locate), {}
    merged |= _from_text(schema, overrides)
    options = _build(schema, merged, overrides, locate)
    for key, value in merged.items():
        _refuse_unknown_nested(value, getattr(options, key), (key,), overrides, locate)
    return options, _plain({key: getattr(options, key) for key in merged})


def _with_rest(
    values: Mapping[str, Any], fields: Mapping[str, Any], rest: str, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options with those that are not in `fields` below the key `rest`, over those in `base`."""
    named = {key: value for key, value in values.items() if key in fields}
    unnamed = {key: value for key, value in values.items() if key not in fields}
    return named | {rest: {**base, **named.get(rest, {}), **unnamed}} if unnamed else named


def as_written(schema: type, values: Mapping[str, Any], spelling: Spelling, locate: Locate) -> dict[str, Any]:
    """Return a file's options; numbers and booleans that the schema reads as text have the file's own spelling.

    `yes` and `no` are booleans where the schema has only bool. Raises ConfigError for a number such as `0400` in a
    patch, which YAML 1.1, and so kubectl, reads as octal, and YAML 1.2 as decimal.
    """

    def convert_value(value: Any, hint: Any, path: Path) -> Any:
        options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        if isinstance(value, Mapping):
            hints = next(filter(None, (_hints(option, value) for option in options)), {})
            return {
                key: convert_value(item, hints[key], (*path, key)) if key in hints and isinstance(key, str) else item
                for key, item in value.items()
            }
        if isinstance(value, list):
            item_hint = next((_item_hint(option) for option in options if _item_hint(option) is not None), None)
            return [convert_value(item, item_hint, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, str):
            return _WORDS.get(value.lower(), value) if bool in options and str not in options else value
        text = spelling(path)
        if text is None or value is None:
            return value
        if Any in options and _LEADING_ZERO.match(text):
            problem = f"{text} is ambiguous. Write {int(text)}, 0o{text.lstrip('+-0')} for octal, or quotes for text"
            raise ConfigError(f"{locate(path, False)}: {_dotted(path)}: {problem}")
        is_own = type(value) in options and (isinstance(value, bool) or str(value) == text)
        return text if str in options and not is_own else value

    hints = typing.get_type_hints(schema)
    return {key: convert_value(value, hints.get(key), (key,)) for key, value in values.items()}


def _hints(option: Any, value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the type of each of the mapping's values, if `option` is a type of mappings."""
    if dataclasses.is_dataclass(option) and isinstance(option, type):
        return typing.get_type_hints(option)
    if option is Any:
        return dict.fromkeys(value, Any)
    origin = typing.get_origin(option)
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return dict.fromkeys(value, typing.get_args(option)[1]) if is_mapping else {}


def _item_hint(option: Any) -> Any:
    """Return the type of a sequence's items; None if `option` is not a type of sequences."""
    origin = typing.get_origin(option)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return typing.get_args(option)[0]
    return Any if option is Any else None


def _flag(key: str) -> str:
    return f"--{key}" if key in _FLAGS else f"--option {key}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they will be when read from a JSON file."""
    import msgspec

    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(values)))
    return plain


def _refuse_unknown(key: str, known: Mapping[str, Any], location: str, *places: str) -> None:
    if key not in known:
        keys = ", ".join(known) or "none"
        raise ConfigError(f"{location}: unknown key {key!r}{hint(key, known, *places)} (keys: {keys})")


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
        option = error.option if isinstance(error, OptionError) else ""
        path: Path = (option,) if option in values and option not in overrides else ()
        raise ConfigError(f"{locate(path, not path)}: {error}") from None
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
