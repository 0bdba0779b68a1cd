"""Checks of a request against the API's limits, by botocore's service model, before AWS is called."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SpecError, nearest
from .request import GIVEN

# Classes of characters that Java's expressions have and Python's have not.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{M}": "\u0300-\u036f", r"\p{P}": "!-/:-@"}
_TYPE = ("ResourceConfig", "InstanceType")
_KINDS: dict[str, Any] = {
    "structure": Mapping, "map": Mapping, "list": (list, tuple), "string": str, "boolean": bool
}  # fmt: skip
_Path = tuple[str, ...]


def check(request: Mapping[str, Any], target: str) -> None:
    """Raise SpecError, naming the flag or option, for a value that the API rejects. Without botocore, do nothing."""
    model = _model()
    if model is None:
        return
    for path, problem in _problems(model, request, ()):
        raise SpecError(f"target {target}: {_given(path)}: {problem}")


def unknown_type(instance_type: str) -> str | None:
    """Return a warning for an instance type that botocore does not list: it may be newer."""
    model = _model()
    if model is None:
        return None
    listed = model.members["ResourceConfig"].members["InstanceType"].enum
    if instance_type in listed:
        return None
    return f"instance_type: botocore lists no {instance_type}{nearest(instance_type, listed)}"


@functools.cache
def _model() -> Any:
    try:
        import botocore.session
    except ImportError:
        return None
    return (
        botocore.session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    )


def _problems(shape: Any, value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    kind, limits = shape.type_name, shape.metadata
    if kind in _KINDS and not isinstance(value, _KINDS[kind]):
        yield path, f"expects {'names and values' if kind in ('structure', 'map') else kind}, not {value!r}"
        return
    if kind == "structure":
        yield from _members(shape, value, path)
    elif kind in ("list", "map"):
        yield from _count(value, limits, path)
        items = enumerate(value) if kind == "list" else value.items()
        for key, each in items:
            inner = shape.member if kind == "list" else shape.value
            yield from _problems(inner, each, (*path, str(key)))
    elif kind == "string":
        yield from _text(shape, value, path)
    elif kind in ("integer", "long"):
        if not isinstance(value, int) or isinstance(value, bool):
            yield path, f"expects a whole number, not {value!r}"
        elif not limits.get("min", value) <= value <= limits.get("max", value):
            yield path, f"expects {_range(limits)}, not {value}"


def _members(shape: Any, value: Mapping[str, Any], path: _Path) -> Iterator[tuple[_Path, str]]:
    for key, each in value.items():
        if key not in shape.members:
            yield (*path, key), f"there is no such key{nearest(key, shape.members)} (keys: {', '.join(shape.members)})"
        else:
            yield from _problems(shape.members[key], each, (*path, key))
    for key in shape.required_members:
        if key not in value:
            yield path, f"{key} is lacking"


def _count(value: Sequence[Any], limits: Mapping[str, Any], path: _Path) -> Iterator[tuple[_Path, str]]:
    if not limits.get("min", 0) <= len(value) <= limits.get("max", len(value)):
        yield path, f"takes {_range(limits)} of them, not {len(value)}"


def _text(shape: Any, value: str, path: _Path) -> Iterator[tuple[_Path, str]]:
    limits = shape.metadata
    if "{" in value and path[:1] != ("AlgorithmSpecification",):
        return  # what only AWS can tell is still open
    if not limits.get("min", 0) <= len(value) <= limits.get("max", len(value)):
        yield path, f"takes {_range(limits)} characters, not {len(value)}"
    elif shape.enum and value not in shape.enum and path != _TYPE:
        yield path, f"expects one of {', '.join(shape.enum)}, not {value!r}{nearest(value, shape.enum)}"
    elif (pattern := limits.get("pattern")) and not re.fullmatch(_python(pattern), value, re.DOTALL):
        yield path, f"AWS takes what matches {pattern}, not {value!r}"


def _python(pattern: str) -> str:
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return pattern


def _range(limits: Mapping[str, Any]) -> str:
    least, most = limits.get("min"), limits.get("max")
    if least and most is not None:
        return f"{least} to {most}"
    return f"{most} or less" if most is not None else f"{least} or more"


def _given(path: _Path) -> str:
    """Return the flag or option that set the value, and the place in it."""
    for length in range(len(path), 0, -1):
        if path[:length] in GIVEN:
            return ": ".join([GIVEN[path[:length]], *path[length:]])
    return "patch: " + ".".join(path)
