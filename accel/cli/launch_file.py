"""The configuration file in Accelerate's form, with the line of every entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from .argv import UsageError


class Configuration(NamedTuple):
    """A file's settings by name, as `accel.settings.config_file.Entry`, and a function that locates them.

    document: the contents as read.
    """

    path: str
    entries: dict[str, Any]
    location: Callable[[tuple[str, ...]], str]
    document: dict[str, Any]


class Loaded(NamedTuple):
    """A file's contents, with names and values not yet checked."""

    path: str
    document: dict[str, Any]
    location: Callable[[tuple[str, ...]], str]


def default_folder() -> str:
    """Return the folder of the default file: Accelerate's."""
    hf_home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(os.path.expanduser(hf_home), "accelerate")


def default_path() -> str:
    """Return the path of the default file. A JSON file counts only without a YAML one."""
    base = os.path.join(default_folder(), "default_config")
    in_json = not os.path.isfile(f"{base}.yaml") and os.path.isfile(f"{base}.json")
    return f"{base}.json" if in_json else f"{base}.yaml"


def empty(command: str) -> Configuration:
    """Return an empty configuration, for no file."""
    return Configuration(command, {}, lambda keys: command, {})


def active_path(path: str | None) -> str | None:
    """Return the file in use: the named one, else the default one, or None if that does not exist."""
    if path is not None:
        return path
    return default_path() if os.path.isfile(default_path()) else None


def read_file(command: str, path: str) -> Configuration:
    """Return the settings in a file of any version, YAML or JSON. Raises UsageError that begins with `file:line`."""
    return validate_file(command, load(command, path))


def load(command: str, path: str) -> Loaded:
    """Return a file's contents, YAML or JSON. Raises UsageError that begins with `file:line` if it is no mapping."""
    document, locate = _load(command, path)
    if document is None:
        document = {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(command, f"{locate(())}: must hold settings, one `name: value` per line")
    return Loaded(path, document, locate)


def validate_file(command: str, file: Loaded) -> Configuration:
    """Return the settings of a loaded file, and warn about keys that nothing reads.

    Raises UsageError that begins with `file:line`.
    """
    from accel.settings.config_file import BadEntry, read_document, unread_keys

    from .output import note

    try:
        entries = read_document(file.document)
    except BadEntry as error:
        raise UsageError(command, f"{file.location(error.keys)}: {error}") from None
    for keys in unread_keys(file.document):
        note(f"warning: {file.location(keys)}: {'.'.join(keys)} is ignored: no version of Accelerate reads it")
    return Configuration(file.path, entries, file.location, file.document)


def _load(command: str, path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    from schedulers.config.yaml_file import YamlFile
    from schedulers.errors import ConfigError

    if not os.path.isfile(path):
        problem = "is not a file" if os.path.exists(path) else "does not exist"
        raise UsageError(command, f"--config_file: cannot read {path}: it {problem}")
    try:
        if path.endswith(".json"):
            return _load_json(path)
        file = YamlFile(path)
    except ConfigError as error:
        raise UsageError(command, f"--config_file: {' '.join(str(error).split())}") from None
    return file.value, lambda keys: file.key_location(*keys) if keys else file.location()


def _load_json(path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    import json

    from schedulers.config.yaml_file import format_path, read_text
    from schedulers.errors import ConfigError

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates = [key for key, value in pairs if dict(pairs)[key] != value]
        if duplicates:
            raise ConfigError(f"{locate((duplicates[0],))}: duplicate key {duplicates[0]!r}")
        return dict(pairs)

    def locate(keys: tuple[str, ...]) -> str:
        """Return the line on which the last of `keys` follows the ones before it."""
        position = 0
        for key in keys:
            position = max(text.find(json.dumps(key), position), position)
        return f"{format_path(path)}:{text.count(chr(10), 0, position) + 1}"

    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=unique_keys), locate
    except json.JSONDecodeError as error:
        raise ConfigError(f"{format_path(path)}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"a value cannot be read: {error}"
        raise ConfigError(f"{format_path(path)}: {reason}") from None
