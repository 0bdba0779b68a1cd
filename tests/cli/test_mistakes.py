"""Every command, from its own parser: each mistake is one line and the right exit code; nobody sees a traceback."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from accel.cli import COMMANDS, exit_status
from accel.cli.completion import options_of
from tests.marks import long

from .conftest import Accel

# Words that are right, with which a command gets as far as the files that it reads. A new command gets a row.
RIGHT: dict[str, list[str]] = {
    "submit": ["--no-python", "true"],
    "launch": ["--explain"],
    "test": ["--target", "local"],
    "list": [],
    "status": ["@last"],
    "describe": ["@last"],
    "logs": ["@last"],
    "wait": ["@last"],
    "cancel": ["@last"],
    "targets": [],
    "prune": ["--keep", "1"],
    "config": ["update"],
    "env": [],
    "estimate-memory": ["./nowhere"],
    "merge-weights": ["nowhere", "out"],
    "to-fsdp2": ["--config_file", "nowhere.yaml", "--overwrite"],
    "tpu-config": ["--command", "true"],
    "completion": ["bash"],
    "fetch": ["@last"],
    "shell": ["@last"],
    "image": ["build", "--tag", "x", "--print"],
    "serve": ["check"],
    "login": ["http://127.0.0.1:1", "--token-file", "nowhere"],
    "logout": [],
    "context": [],
    "token": ["list"],
}
# Their words are as many as one likes, or those of a program.
MANY_WORDS = ("submit", "launch", "wait", "cancel", "prune", "shell")
# Those that read and write the most files.
_SOME = ("submit", "launch", "status", "prune", "config", "env")
NEEDS_NO_WORDS = ("test", "list", "targets", "config", "env", "serve", "context")


def actions(command: str) -> list[argparse.Action]:
    return list({id(action): action for action in options_of(command).values()}.values())


def is_one_line(done: subprocess.CompletedProcess[bytes], code: int) -> str:
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert said.count("\n") == 1, said
    assert said.startswith("accel"), said
    assert done.stdout == b""
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option(accel: Accel, command: str) -> None:
    for argv in (["--no-such-option"], ["--no-such-option=1"], ["-Q"]):
        said = is_one_line(accel.in_process(command, *argv), exit_status.USAGE)
        assert argv[0].partition("=")[0] in said
        assert f"accel {command} --help" in said


def long_options(command: str) -> list[str]:
    return [name for action in actions(command) for name in action.option_strings if len(name) > 6]


@pytest.mark.parametrize("command", [command for command in COMMANDS if long_options(command)])
def test_a_near_miss_is_named(accel: Accel, command: str) -> None:
    said = is_one_line(accel.in_process(command, long_options(command)[0][:-1]), exit_status.USAGE)
    assert "did you mean '--" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_is_missing_or_not_wanted(accel: Accel, command: str) -> None:
    with_value = [action for action in actions(command) if action.nargs not in (0, "?")]
    flags = [action for action in actions(command) if action.nargs == 0 and action.dest != "help"]
    for action in with_value[:2]:
        said = is_one_line(accel.in_process(command, action.option_strings[-1]), exit_status.USAGE)
        assert "needs a value" in said
    for action in flags[:2]:
        said = is_one_line(accel.in_process(command, f"{action.option_strings[-1]}=x"), exit_status.USAGE)
        assert "takes no value" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_is_none_of_the_choices(accel: Accel, command: str) -> None:
    for action in [action for action in actions(command) if action.choices is not None][:2]:
        said = is_one_line(accel.in_process(command, f"{action.option_strings[-1]}=no-such-thing"), exit_status.USAGE)
        assert "no-such-thing" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_words_that_are_missing_or_too_many(accel: Accel, command: str) -> None:
    if command not in NEEDS_NO_WORDS:
        is_one_line(accel.in_process(command), exit_status.USAGE)
    if command not in MANY_WORDS:
        is_one_line(accel.in_process(command, *["one", "two", "three", "four"]), exit_status.USAGE)


_some_commands = pytest.mark.parametrize("command", [*_SOME, *long(*(name for name in COMMANDS if name not in _SOME))])


@_some_commands
def test_files_that_are_broken(accel: Accel, command: str) -> None:
    """accel.yaml and the configuration file: whoever reads them says in one line where they are wrong."""
    (accel.here / "accel.yaml").write_text("targets: {local: {kind: local, concurrencyy: 1}, a: [")
    default = accel.here / "hf/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("num_proceses: [")
    done = accel.finish(command, *RIGHT[command], HF_HOME=str(accel.here / "hf"))
    said = done.stderr.decode()
    assert "Traceback" not in said
    assert said.count("\n") <= 1, said
    if done.returncode != exit_status.OK:
        assert said.startswith("accel"), said


@_some_commands
def test_a_home_that_cannot_be_written(accel: Accel, command: str, tmp_path: Path) -> None:
    """Not by its permissions, which the super-user has no heed of: there is a file where the directory would be."""
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file/home")
    env = {"ACCEL_HOME": inside, "ACCEL_CONFIG_HOME": inside, "HF_HOME": inside, "HOME": inside}
    done = accel.finish(command, *RIGHT[command], **env)
    said = done.stderr.decode()
    assert "Traceback" not in said
    assert said.count("\n") <= 2, said
    if done.returncode != exit_status.OK:
        assert said.startswith("accel"), said
