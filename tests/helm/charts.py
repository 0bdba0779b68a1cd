"""The charts, their values files, and what their schemas and comments say of every value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHARTS = [ROOT / "helm/accel", ROOT / "helm/accel-job"]
VALUES = Path(__file__).parent / "values"

_COMMENT = re.compile(r"^ *# -- (.*)$")
_PLURALS = {"string": "strings", "object": "objects", "array": "lists"}
_KEY = re.compile(r"^( *)([A-Za-z]+):")


def values_files(chart: Path) -> list[Path]:
    return sorted((VALUES / chart.name).glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    """A values file; of one that only comments, nothing."""
    return yaml.safe_load(path.read_text()) or {}


def schema(chart: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((chart / "values.schema.json").read_text())
    return found


def resolved(whole: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema, or what it refers to."""
    while "$ref" in part:
        part = whole["definitions"][part["$ref"].rpartition("/")[2]]
    return part


def leaves(chart: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted key, its schema) of every value: what has a comment of its own, or is taken apart no further by name."""
    whole, said = schema(chart), comments(chart)

    def walk(prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, inner in part["properties"].items():
            inner = resolved(whole, inner)
            if inner.get("properties") and f"{prefix}{name}" not in said:
                yield from walk(f"{prefix}{name}.", inner)
            elif prefix or name != "global":
                yield f"{prefix}{name}", inner

    yield from walk("", whole)


def at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key. Raises KeyError."""
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping):
            raise KeyError(key)
        found = found[part]
    return found


def nested(key: str, value: object) -> dict[str, Any]:
    """Values in which only a dotted key is given."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def comments(chart: Path) -> dict[str, str]:
    """dotted key -> its `# --` comment in values.yaml."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment = ""
    for line in (chart / "values.yaml").read_text().splitlines():
        if said := _COMMENT.match(line):
            comment = said[1]
        elif key := _KEY.match(line):
            path = [(indent, name) for indent, name in path if indent < len(key[1])]
            path.append((len(key[1]), key[2]))
            if comment:
                found[".".join(name for _, name in path)] = comment
            comment = ""
    return found


def table(chart: Path) -> str:
    """The chart's values as a table for its README."""
    said, defaults = comments(chart), load(chart / "values.yaml")
    lines = ["| value | type | default | what it is |", "| --- | --- | --- | --- |"]
    for key, part in leaves(chart):
        default = json.dumps(at(defaults, key), ensure_ascii=False)
        meaning = said[key].replace("|", "\\|")
        lines.append(f"| `{key}` | {kind_of(chart, part)} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def kind_of(chart: Path, part: Mapping[str, Any]) -> str:
    """A value's type, in a few words."""
    if "enum" in part:
        return " or ".join(f"`{value}`" for value in part["enum"] if value)
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if types == ["array"]:
        inner = resolved(schema(chart), part["items"])
        return f"list of {_PLURALS[inner['type']]}" if isinstance(inner.get("type"), str) else "list"
    return " or ".join(name for name in types if name != "null")
