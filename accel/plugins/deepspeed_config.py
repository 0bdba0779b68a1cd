"""DeepSpeed's own configuration: reading it, and access to its nested keys."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from accel.errors import ArgumentError


class HfDeepSpeedConfig:
    """A configuration of DeepSpeed, and queries of its keys, such as ``"zero_optimization.stage"``.

    ``config_file_or_dict``: a JSON file, a dict, or JSON or base64 text of it. Raises `ArgumentError` for anything
    else.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config, self.source = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage and whether anything is offloaded, again."""
        stage = self.get_value("zero_optimization.stage", -1)
        self._stage = int(stage) if str(stage).isdecimal() else stage
        devices = {self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param")}
        self._offload = self._stage in (2, 3) and bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that holds a key, or None, and the last part of the key."""
        *parents, key = ds_key_long.split(".")
        node: Any = self.config
        for parent in parents:
            node = node.get(parent)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Set the value of a key, with the dicts on the way to it."""
        *parents, key = ds_key_long.split(".")
        node = self.config
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key. Raises `ArgumentError` with ``must_exist`` if it is missing."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ArgumentError(f"{self.source} has no {ds_key_long}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if a key is set and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if a key is set and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return True at stage 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return True at stage 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return True if the optimizer or the parameters are on the CPU or an NVMe disk."""
        return self._offload


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """Return the configuration and a name of its source, for messages."""
    if isinstance(source, Mapping):
        return deepcopy(dict(source)), "the DeepSpeed configuration"
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(f"DeepSpeed configuration: a {type(source).__name__} is neither a path nor a dict")
    path = Path(source)
    if _is_file(path):
        return _parsed(path.read_text(encoding="utf-8"), str(path)), str(path)
    text = str(source).strip()
    try:
        if not text.startswith("{"):
            text = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise ArgumentError(f"DeepSpeed configuration {str(source)!r}: no such file, nor base64 text of JSON") from None
    return _parsed(text, "the DeepSpeed configuration"), "the DeepSpeed configuration"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # text that is too long for a name
        return False


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name}: line {error.lineno}: no JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{name}: a JSON object is expected, not {type(config).__name__}")
    return config
