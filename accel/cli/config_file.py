"""What is in the configuration file, unjudged: `launch_file` knows what it means."""

from __future__ import annotations

import os
from typing import Any

from .launch_file import default_path
from .words import UsageError


def read(command: str, path: str) -> dict[str, Any]:
    """The settings in the file, YAML or JSON. Raises UsageError, in one line, for a file that holds none."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)  # JSON is YAML
    except OSError as error:
        raise UsageError(command, f"--config_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(command, f"--config_file: {path} is not text in UTF-8") from None
    except yaml.YAMLError as error:
        raise UsageError(command, f"--config_file: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(command, f"--config_file: {path} must hold settings, one `name: value` a line")
    return found


def read_in_use(command: str, path: str | None) -> tuple[str, dict[str, Any] | None]:
    """The file that counts and its settings: the one named, or else the default one, ``None`` if that is not there."""
    if path is None and not os.path.isfile(default_path()):
        return default_path(), None
    path = path or default_path()
    return path, read(command, path)
