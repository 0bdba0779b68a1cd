"""Terraform's files, as plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.needs import package


def module(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The blocks of all files, by their word."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.tf")):
        for word, blocks in plain(package("hcl2").loads(path.read_text())).items():
            found.setdefault(word, []).extend(blocks)
    return found


def plain(value: Any) -> Any:
    """Without the parser's own marks and quotes."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items() if not key.startswith("__")}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value[1:-1] if isinstance(value, str) and value[:1] == value[-1:] == '"' else value
