"""Validation of a target's options. The target's `Options` dataclass is the only schema."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..convert import convert
from ..errors import ConfigError, SchedulerError, nearest

Path = tuple[str | int, ...]
# Where the value (or, when asked, the key) at a path stands, and whose it is: `accel.yaml:7: target lab`.
Place = Callable[[Path, bool], str]

# Target options that the command line has flags for.
_FLAGS = ("hosts", "hostfile", "spares")

_AT = re.compile(r" - at `(key in )?\$(?P<path>[^`]*)`\Z")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `(?P<type>[^`]*)`(?P<limit>[^`]*), got `[^`]*`")


def make_options(
    schema: type, values: Mapping[str, Any], overrides: Mapping[str, Any], place: Place, *, kind: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Return the options, and the given ones as plain JSON values. Raises ConfigError.

    `overrides`, from the command line, take precedence; text in them may stand for a number, true or false.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in values:
        _refuse_unknown(key, fields, place((key,), True))
    for key in overrides:
        if key not in fields:
            words = ", ".join(fields) or "none"
            whose = f"the {kind} target" if kind else "this target"
            raise ConfigError(f"{_flag(key)}: {whose} has no such option{nearest(key, fields)} (options: {words})")
    given = {**values, **overrides}
    missing = [name for name, f in fields.items() if name not in given and _required(f)]
    if missing:
        raise ConfigError(f"{place((), True)}: missing {', '.join(map(repr, missing))} (keys: {', '.join(fields)})")
    if not given:  # the usual case, without the cost of importing the validator
        return _build(schema, {}, overrides, place), {}
    given |= _from_text(schema, overrides)
    options = _build(schema, given, overrides, place)
    for key, value in given.items():
        _refuse_dropped(value, getattr(options, key), (key,), overrides, place)
    return options, _plain({key: getattr(options, key) for key in given})


def _flag(key: str) -> str:
    return f"--{key}" if key in _FLAGS else f"--option {key}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as they will be when read from a JSON file."""
    import json

    import msgspec

    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(values)))
    return plain


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _refuse_unknown(key: str, known: Mapping[str, Any], where: str) -> None:
    if key not in known:
        keys = ", ".join(known) or "none"
        raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)} (keys: {keys})")


def _from_text(schema: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that are text and stand for another type, converted to it."""
    import typing

    import msgspec

    types = typing.get_type_hints(schema)
    found = {}
    for key, value in overrides.items():
        if isinstance(value, str):
            try:
                found[key] = msgspec.to_builtins(convert(value, types[key], strict=False))
            except msgspec.ValidationError:
                continue  # said, with its place, when everything is converted
    return found


def _build(schema: type, given: Mapping[str, Any], overrides: Mapping[str, Any], place: Place) -> Any:
    try:
        if not given:
            return schema()
        import msgspec

        try:
            return convert(dict(given), schema)
        except msgspec.ValidationError as error:
            problem = str(error)
    except SchedulerError as error:
        raise ConfigError(f"{place((), True)}: {error}") from None
    raise _refusal(schema, problem, given, overrides, place)


def _refusal(
    schema: type, problem: str, given: Mapping[str, Any], overrides: Mapping[str, Any], place: Place
) -> ConfigError:
    """Translate msgspec's message: the place, the expected value and the actual one."""
    found = _AT.search(problem)
    path = _steps(found["path"]) if found else ()
    what = problem[: found.start()] if found else problem
    what = _EXPECTED.sub(lambda m: f"expects {m['type'].replace(' | null', '')}{m['limit']}", what)
    if what.startswith("expects "):
        value = _at(given, path)
        what += f", got {'nothing' if value is None else f'{type(value).__name__} {value!r}'}"
        if what.startswith("expects str,") and isinstance(value, float):  # a version: 3.10 is read as 3.1
            what += "; put it in quotes"
    elif what.startswith("Invalid enum value"):
        what = f"expects {_choices(schema, path)}, got {_at(given, path)!r}"
    name = _dotted(path)
    if path and path[0] in overrides:
        return ConfigError(f"{_flag(name)}: {what}")
    return ConfigError(f"{place(path, False)}: {f'{name}: ' if name else ''}{what}")


def _choices(schema: type, path: Path) -> str:
    import enum
    import typing

    hint = typing.get_type_hints(schema).get(str(path[0])) if len(path) == 1 else None
    options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is not typing.Literal else [hint]
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words += [repr(word) for word in typing.get_args(option)]
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            words += [repr(member.value) for member in option]
    return f"one of {', '.join(words)}" if words else "another value"


def _refuse_dropped(given: Any, kept: Any, path: Path, overrides: Mapping[str, Any], place: Place) -> None:
    """Raise ConfigError for an unknown key in a nested dataclass: the validator drops it silently."""
    if isinstance(given, Mapping) and dataclasses.is_dataclass(kept):
        names = [f.name for f in dataclasses.fields(kept)]
        for key, value in given.items():
            where = "--option" if path[0] in overrides else f"{place((*path, key), True)}:"
            _refuse_unknown(key, dict.fromkeys(names), f"{where} {_dotted(path)}")
            _refuse_dropped(value, getattr(kept, key), (*path, key), overrides, place)
    elif isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            _refuse_dropped(value, kept.get(key), (*path, key), overrides, place)
    elif _is_list(given) and _is_list(kept) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            _refuse_dropped(value, other, (*path, index), overrides, place)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _steps(text: str) -> Path:
    steps = [m["key"] if m["key"] is not None else m["index"] for m in _STEP.finditer(text)]
    # `[...]` is "some value of this mapping": the place is as near as the mapping.
    known = steps[: steps.index("...")] if "..." in steps else steps
    return tuple(int(step) if step.isdigit() else step for step in known)


def _at(value: Any, path: Path) -> Any:
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _dotted(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
