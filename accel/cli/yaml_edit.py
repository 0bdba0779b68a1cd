"""Change one value in a hand-written YAML file and keep everything else, comments included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node


def with_value(text: str, keys: Sequence[str], value: Any) -> str:
    """Return the text of an accel.yaml with `value` at the path `keys`; missing mappings on the way are created.

    A part that has no room for it (`{a: 1}`) is rewritten without its comments. Raises yaml.YAMLError.
    """
    import yaml

    from schedulers.config.yaml_file import core_values

    document = core_values(text)
    expected = _set(document, keys, value)
    changed = _changed(text, yaml.compose(text, Loader=yaml.SafeLoader), document, keys, value)
    try:
        if changed is not None and core_values(changed) == expected:
            return changed
    except yaml.YAMLError:
        pass
    return _dumped(expected)


def _set(document: Any, keys: Sequence[str], value: Any) -> Any:
    if not keys:
        return value
    mapping = dict(document) if isinstance(document, Mapping) else {}
    return {**mapping, keys[0]: _set(mapping.get(keys[0]), keys[1:], value)}


def _changed(text: str, node: Node | None, document: Any, keys: Sequence[str], value: Any) -> str | None:
    """Return the changed text, or None if there is no room."""
    from yaml.nodes import MappingNode

    if node is None:
        return _joined(text, _dumped(_set({}, keys, value)))
    if not isinstance(node, MappingNode) or node.flow_style:
        return None
    entry = next((pair for pair in node.value if pair[0].value == keys[0]), None)
    if entry is None:
        return _inserted(text, node, _dumped(_set({}, keys, value)))
    key, child = entry
    if len(keys) > 1:
        changed = _changed(text, child, document[keys[0]], keys[1:], value)
        return changed or _rewritten(text, key, child, _set(document[keys[0]], keys[1:], value))
    if isinstance(value, Mapping) or "\n" in text[child.start_mark.index : child.end_mark.index]:
        return _rewritten(text, key, child, value)
    return _replaced(text, child, value)


def _inserted(text: str, node: MappingNode, block: str) -> str:
    """Append the block to the mapping, with its indentation."""
    column = node.start_mark.column
    position = _end_of_line(text, node)
    lines = "".join(" " * column + line for line in block.splitlines(keepends=True))
    return _joined(text[:position], lines) + text[position:]


def _rewritten(text: str, key: Node, child: Node, value: Any) -> str:
    """Rewrite the key with its value in place."""
    lines = _dumped({key.value: value}).splitlines(keepends=True)
    block = lines[0] + "".join(" " * key.start_mark.column + line for line in lines[1:])
    return text[: key.start_mark.index] + block + text[_end_of_line(text, child) :]


def _replaced(text: str, node: Node, value: Any) -> str:
    """Replace a one-line value by another."""
    start, end = node.start_mark.index, node.end_mark.index
    return text[:start] + (" " if text[start - 1 : start] == ":" else "") + _on_a_line(value) + text[end:]


def _end_of_line(text: str, node: Node) -> int:
    """Return the end of the node's last line. A block's own end mark is after the comments that follow it."""
    from yaml.nodes import CollectionNode, MappingNode

    while isinstance(node, CollectionNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, MappingNode) else node.value[-1]
    newline = text.find("\n", node.end_mark.index)
    return len(text) if newline < 0 else newline + 1


def _joined(text: str, block: str) -> str:
    return text + ("" if not text or text.endswith("\n") else "\n") + block


def _dumped(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000))


def _on_a_line(value: Any) -> str:
    import yaml

    dumped = str(yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000))
    return dumped.removesuffix("...\n").strip()
