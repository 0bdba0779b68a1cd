"""Reading the configuration file, which has Accelerate's form, with the line of everything in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from .argv import UsageError


class Configuration(NamedTuple):
    """A file's settings by name, as `accel.settings.config_file.Entry`, and where in it something stands.

    document: the same as the file has them.
    """

    path: str
    entries: dict[str, Any]
    where: Callable[[tuple[str, ...]], str]
    document: dict[str, Any]


class Loaded(NamedTuple):
    """What a file holds, whether or not its names and values are right."""

    path: str
    document: dict[str, Any]
    where: Callable[[tuple[str, ...]], str]


def default_folder() -> str:
    """Where the file is that is read when none is named: Accelerate's place."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(os.path.expanduser(home), "accelerate")


def default_path() -> str:
    """The file that is read when none is named. One in JSON counts where there is none in YAML."""
    base = os.path.join(default_folder(), "default_config")
    in_json = not os.path.isfile(f"{base}.yaml") and os.path.isfile(f"{base}.json")
    return f"{base}.json" if in_json else f"{base}.yaml"


def nothing(command: str) -> Configuration:
    """Of no file."""
    return Configuration(command, {}, lambda keys: command, {})


def in_use(path: str | None) -> str | None:
    """The file that counts: the one named, else the default one; None if that is not there."""
    if path is not None:
        return path
    return default_path() if os.path.isfile(default_path()) else None


def read_file(command: str, path: str) -> Configuration:
    """The settings in a file of any version, YAML or JSON. Raises UsageError, which begins `file:line`."""
    return judged(command, load(command, path))


def load(command: str, path: str) -> Loaded:
    """What a file holds, YAML or JSON. Raises UsageError, which begins `file:line`, for one that holds no names."""
    document, where = _load(command, path)
    if document is None:
        document = {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(command, f"{where(())}: must hold settings, one `name: value` a line")
    return Loaded(path, document, where)


def judged(command: str, file: Loaded) -> Configuration:
    """The settings that a file holds. Raises UsageError, which begins `file:line`."""
    from accel.settings.config_file import BadEntry, read_document

    try:
        return Configuration(file.path, read_document(file.document), file.where, file.document)
    except BadEntry as error:
        raise UsageError(command, f"{file.where(error.keys)}: {error}") from None


def _load(command: str, path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    from schedulers.config.yaml_file import YamlFile
    from schedulers.errors import ConfigError

    if not os.path.isfile(path):
        what = "is not a file" if os.path.exists(path) else "does not exist"
        raise UsageError(command, f"--config_file: cannot read {path}: it {what}")
    try:
        if path.endswith(".json"):
            return _load_json(path)
        file = YamlFile(path)
    except ConfigError as error:
        raise UsageError(command, f"--config_file: {' '.join(str(error).split())}") from None
    return file.value, lambda keys: file.where_key(*keys) if keys else file.where()


def _load_json(path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    import json

    from schedulers.config.yaml_file import read_text, shown
    from schedulers.errors import ConfigError

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, value in pairs if dict(pairs)[key] != value]
        if twice:
            raise ConfigError(f"{where((twice[0],))}: key {twice[0]!r} is there twice")
        return dict(pairs)

    def where(keys: tuple[str, ...]) -> str:
        """The line on which the last of `keys` follows the ones before it."""
        at = 0
        for key in keys:
            at = max(text.find(json.dumps(key), at), at)
        return f"{shown(path)}:{text.count(chr(10), 0, at) + 1}"

    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=once), where
    except json.JSONDecodeError as error:
        raise ConfigError(f"{shown(path)}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        said = "nested too deeply" if isinstance(error, RecursionError) else f"a value cannot be read: {error}"
        raise ConfigError(f"{shown(path)}: {said}") from None
