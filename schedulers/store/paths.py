"""The directories of this user's jobs and configuration. An environment variable overrides each."""

from __future__ import annotations

import os
import sys


def data_home() -> str:
    """Return `$ACCEL_HOME`, else the user's data directory: an absolute path, which need not exist."""
    return _path_from_env("ACCEL_HOME") or _user_directory("data", "XDG_DATA_HOME", ".local/share")


def config_home() -> str:
    """Return `$ACCEL_CONFIG_HOME`, else the user's configuration directory: an absolute path, which need not exist."""
    return _path_from_env("ACCEL_CONFIG_HOME") or _user_directory("config", "XDG_CONFIG_HOME", ".config")


def servers_file() -> str:
    """Return the path of the file with the servers of `accel login`, which need not exist."""
    return os.path.join(config_home(), "servers.yaml")


def _path_from_env(variable: str) -> str | None:
    value = os.environ.get(variable, "").strip()
    return os.path.abspath(os.path.expanduser(value)) if value else None


def _user_directory(kind: str, variable: str, below_home: str) -> str:
    if sys.platform.startswith("linux"):
        # platformdirs gives the same answer (a test compares them), but importing it costs a Python start.
        base = os.environ.get(variable, "").strip() or os.path.join(os.path.expanduser("~"), below_home)
        return os.path.abspath(os.path.join(base, "accel"))
    import platformdirs

    return platformdirs.user_data_dir("accel") if kind == "data" else platformdirs.user_config_dir("accel")
