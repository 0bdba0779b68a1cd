"""Reading the configuration file, which has Accelerate's form, with the line of everything in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from .words import UsageError


class Configuration(NamedTuple):
    """A file's settings by name, as `accel.settings.file.Entry`, and where in it something stands."""

    path: str
    entries: dict[str, Any]
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
    return Configuration(command, {}, lambda keys: command)


def read_file(command: str, path: str) -> Configuration:
    """The settings in a file of any version, YAML or JSON. Raises UsageError, which begins `file:line`."""
    from accel.settings.file import BadEntry, read_document

    document, where = _load(command, path)
    if document is None:
        document = {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(command, f"{where(())}: must hold settings, one `name: value` a line")
    try:
        return Configuration(path, read_document(document), where)
    except BadEntry as error:
        raise UsageError(command, f"{where(error.keys)}: {error}") from None


def read_flags(command: str, path: str) -> list[str]:
    """The file's settings as flags of `accel launch`. Raises UsageError for a file or a setting that it cannot take."""
    from accel.settings import BY_NAME
    from accel.settings.layers import resolve
    from accel.settings.values import typed

    file = read_file(command, path)
    flags = []
    for name, (value, _, layer) in resolve({}, {}, file.entries, file.where).items():
        setting = BY_NAME[name]
        if layer == "default" or not setting.flag or (value is False and setting.kind == "switch"):
            continue
        flag = setting.spellings()[1 if setting.short else 0]
        if setting.kind == "switch":
            flags.append(flag)
        elif setting.kind == "words":
            flags += [f"{flag}={word}" for word in value]
        else:
            flags.append(f"{flag}={typed(setting, value)}")
    return flags


def _load(command: str, path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    from schedulers.errors import ConfigError
    from schedulers.yamlfile import YamlFile

    if not os.path.isfile(path):
        what = "is not a file" if os.path.exists(path) else "does not exist"
        raise UsageError(command, f"--config_file: cannot read {path}: it {what}")
    if path.endswith(".json"):
        return _load_json(command, path)
    try:
        file = YamlFile(path)
    except ConfigError as error:
        raise UsageError(command, f"--config_file: {' '.join(str(error).split())}") from None
    return file.value, lambda keys: file.where_key(*keys) if keys else file.where()


def _load_json(command: str, path: str) -> tuple[Any, Callable[[tuple[str, ...]], str]]:
    import json

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, value in pairs if dict(pairs)[key] != value]
        if twice:
            raise UsageError(command, f"{where((twice[0],))}: key {twice[0]!r} is there twice")
        return dict(pairs)

    def where(keys: tuple[str, ...]) -> str:
        """The line on which the last of `keys` follows the ones before it."""
        at = 0
        for key in keys:
            at = max(text.find(json.dumps(key), at), at)
        return f"{path}:{text.count(chr(10), 0, at) + 1}"

    text = ""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        return json.loads(text, object_pairs_hook=once), where
    except json.JSONDecodeError as error:
        raise UsageError(command, f"--config_file: {path}:{error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise UsageError(command, f"--config_file: {path}:1: not UTF-8") from None
    except OSError as error:
        raise UsageError(command, f"--config_file: cannot read {path}: {error.strerror}") from None
