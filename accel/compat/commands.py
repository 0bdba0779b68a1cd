"""The names that libraries import from `accelerate.commands`: launcher functions and the configuration file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from accel.cli import config
from accel.cli.argv import UsageError
from accel.cli.launch import resolve_settings
from accel.cli.launch_file import default_folder, default_path
from accel.errors import ArgumentError
from accel.launch.flags import add_arguments
from accel.launch.signals import run_child
from accel.settings import BY_NAME, defaults
from accel.settings.setting import typed

cache_dir = default_folder()
default_config_file = default_json_config_file = default_yaml_config_file = f"{cache_dir}/default_config.yaml"


class Configuration:
    """The values of a configuration file as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """Return every value by its name."""
        return dict(self.__dict__)


def load_config_from_file(config_file: str | os.PathLike[str] | None) -> Configuration:
    """Read a file of ``accelerate config``, by default the default one.

    Raises `ArgumentError` if it is missing or cannot be read.
    """
    import yaml

    path = Path(config_file or default_path())
    try:
        text = path.read_text()
    except OSError as error:
        raise ArgumentError(f"configuration file {path}: {error.strerror}") from None
    values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ArgumentError(f"configuration file {path} is not a mapping of names to values")
    return Configuration(values)


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] = default_config_file
) -> Path | Literal[False]:
    """Write the file of ``accel config default``; return its path, or False if there is a file, which is kept."""
    path = Path(save_location)
    if path.exists():
        return False
    options = {"action": "default", "mixed_precision": mixed_precision.lower(), "answers": None, "json": False}
    try:
        config.run(argparse.Namespace(config_file=str(path), **options))
    except UsageError as error:
        raise ArgumentError(str(error)) from None
    return path


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of `accel launch`'s flags, a script, and the script's own arguments."""
    description = "Run a script here and now, one process per accelerator"
    if subparsers is None:
        parser = argparse.ArgumentParser("accelerate launch", description=description, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("launch", description=description, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("training_script", help="the script, module (-m) or command (--no_python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Launch the script of ``args`` in a child process, where `accelerate` is accel's, and wait for its end.

    Raises `ValueError` for contradictory settings, and `subprocess.CalledProcessError` with the exit code of a
    failed program; with ``quiet`` that is a `SystemExit`. A termination signal ends the launch first.
    """
    explicit = _explicit(args)
    try:
        resolve_settings(explicit)
    except UsageError as error:
        raise ArgumentError(str(error)) from None
    command = [sys.executable, "-m", "accel", "launch", *_flags(explicit), "--"]
    command += [args.training_script, *args.training_script_args]
    code = run_child(command)
    if code and args.quiet:
        raise SystemExit(code)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _explicit(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings in ``args`` that differ from their defaults."""
    arguments = vars(args)
    explicit = {
        name: arguments[name] for name, default in defaults().items() if arguments.get(name, default) != default
    }
    return {**explicit, "compat": True}


def _flags(explicit: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in explicit.items():
        setting = BY_NAME[name]
        if setting.kind == "switch":
            flags += [setting.display_name]
        elif setting.kind == "words":
            flags += [f"{setting.display_name}={word}" for word in value]
        else:
            flags += [f"{setting.display_name}={typed(setting, value)}"]
    return flags


def main() -> None:
    """Run ``accelerate-launch`` with this process's arguments; a single rank replaces this process."""
    from accel.cli import main

    raise SystemExit(main(["launch", "--compat", *sys.argv[1:]]))
