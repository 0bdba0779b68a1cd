"""A YAML file with the line of every node, for error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ..errors import ConfigError

Step = str | int


class YamlFile:
    """A parsed file: its plain value, and the line of each part.

    `core`: scalars by the core schema of YAML 1.2, else by YAML 1.1, as PyYAML and Accelerate read them.

    Raises ConfigError that begins with `file:line`, or with `file` if it cannot be opened.
    """

    def __init__(self, path: str, *, core: bool = False) -> None:
        self.path = path
        self.shown = format_path(path)
        text = read_text(path)
        loader = yaml.SafeLoader("")
        try:
            loader = (_CoreLoader if core else _YamlLoader)(text)
            node = loader.get_single_node()
            self.root: Node | None = node
            if node is not None:
                self._check(node)
            self.value: Any = None if node is None else loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            line, problem = _located(error, text)
            raise ConfigError(f"{self.shown}:{line}: {problem}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{self.shown}:{line}: a character that YAML forbids: {chr(error.character)!r}") from None
        except RecursionError:
            raise ConfigError(f"{self.shown}:{loader.line + 1}: nested too deeply") from None
        finally:
            loader.dispose()

    def location(self, *path: Step) -> str:
        """Return `file:line` of the value at `path`, or of the nearest thing around it if there is none."""
        node = self._find(path)
        return f"{self.shown}:{1 if node is None else node.start_mark.line + 1}"

    def key_location(self, *path: str) -> str:
        """Return `file:line` of the key at the end of `path`, which may be lines above its value."""
        node = self._find(path[:-1])
        for key, _ in reversed(_pairs(node)):
            if key.value == path[-1]:
                return f"{self.shown}:{key.start_mark.line + 1}"
        return self.location(*path)

    def spelling(self, *path: Step) -> str | None:
        """Return the text of the unquoted scalar at `path`; None for anything else."""
        node = self.root
        for step in path:
            node = _child(node, step)
        return node.value if isinstance(node, ScalarNode) and node.style is None else None

    def _check(self, root: Node) -> None:
        """Reject duplicate keys, where YAML silently uses the last one, and values that contain themselves."""
        pending: list[tuple[Node, bool]] = [(root, False)]
        seen: set[int] = set()
        ancestors: set[int] = set()
        while pending:
            node, finished = pending.pop()
            if finished:
                ancestors.discard(id(node))
            elif id(node) in ancestors:
                raise ConfigError(f"{self.shown}:{node.start_mark.line + 1}: a value that is inside itself")
            elif id(node) not in seen:
                seen.add(id(node))
                ancestors.add(id(node))
                self._refuse_duplicates(node)
                pending.append((node, True))
                children = _items(node) + [part for pair in _pairs(node) for part in pair]
                pending += [(child, False) for child in children]

    def _refuse_duplicates(self, node: Node) -> None:
        first_seen: dict[tuple[str, str], tuple[int, Node]] = {}
        for key, value in _pairs(node):
            line = key.start_mark.line + 1
            first_line, first_value = first_seen.setdefault((key.tag, str(key.value)), (line, value))
            same = isinstance(value, ScalarNode) and (value.tag, value.value) == (first_value.tag, first_value.value)
            if first_value is not value and not same:
                raise ConfigError(f"{self.shown}:{line}: key {key.value!r} is already on line {first_line}")

    def _find(self, path: Sequence[Step]) -> Node | None:
        node = self.root
        for step in path:
            child = _child(node, step)
            if child is None:
                return node
            node = child
        return node


def _located(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    """Return the line and the problem, in plain words if a bracket is left open."""
    bracket = _unclosed(text)
    if bracket is not None:
        return bracket[0], f"{bracket[1]!r} is never closed"
    mark = error.problem_mark or error.context_mark
    return mark.line + 1 if mark else 1, error.problem or error.context or "not valid YAML"


def _unclosed(text: str) -> tuple[int, str] | None:
    """Return the line and character of the innermost bracket that is still open at the end of the text."""
    brackets: list[tuple[int, str]] = []
    try:
        for token in yaml.scan(text):
            if isinstance(token, (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken)):
                brackets.append((token.start_mark.line + 1, text[token.start_mark.index]))
            elif isinstance(token, (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)) and brackets:
                brackets.pop()
    except yaml.YAMLError:
        return None
    return brackets[-1] if brackets else None


def read_text(path: str) -> str:
    """Return the file's text. Raises ConfigError, with the line that is not UTF-8."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise ConfigError(f"{format_path(path)}: cannot be read: {error.strerror}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{format_path(path)}:{line}: not UTF-8") from None


def format_path(path: str) -> str:
    """Return the path for messages: relative if it is below the current directory."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current directory was deleted
        return path
    return path if relative.startswith("..") else relative


def core_values(text: str) -> Any:
    """Return the values of a document by the core schema of YAML 1.2. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_CoreLoader)


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's pure Python loader: the C one counts lines differently for some errors.

    A value that cannot be constructed, such as the date `2024-13-99`, is an error with its line.
    """

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            problem = f"a value cannot be read: {error}" if isinstance(error, ValueError) else "no such value"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


class _CoreLoader(_YamlLoader):
    """A loader by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), with merge keys.

    `1:00:00`, `yes` and `2024-01-01` are text, and `010` is ten.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own way)

    def construct_number(self, node: ScalarNode) -> int | float:
        text = str(self.construct_scalar(node)).lower()
        if text.startswith(("0o", "0x")):
            return int(text, 0)
        return int(text) if node.tag.endswith(":int") else float(text.replace(".inf", "inf").replace(".nan", "nan"))


_CORE_TAGS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": ("<<", "<"),
}
for _tag, (_pattern, _first) in _CORE_TAGS.items():
    _characters = ["" if _character == "\0" else _character for _character in _first]
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _characters)
for _tag in ("int", "float"):
    _CoreLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _CoreLoader.construct_number)


def _pairs(node: Node | None) -> list[tuple[Node, Node]]:
    return list(node.value) if isinstance(node, MappingNode) else []


def _items(node: Node | None) -> list[Node]:
    return list(node.value) if isinstance(node, SequenceNode) else []


def _child(node: Node | None, step: Step) -> Node | None:
    if isinstance(step, int):
        return next(iter(_items(node)[step : step + 1]), None)
    # The last one counts: keys that `<<` merges stand before a mapping's own.
    return next((value for key, value in reversed(_pairs(node)) if key.value == step), None)
