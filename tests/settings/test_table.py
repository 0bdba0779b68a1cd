"""The table of Accelerate 1.15's options: each is accepted in both spellings, and has a test that shows what it does.

`accelerate_flags.tsv` holds the table: facts about the interface, a row an option.
"""

from __future__ import annotations

import ast
import csv
import importlib
from pathlib import Path
from typing import NamedTuple

import pytest

from accel.cli import COMMANDS
from accel.cli.arguments import Parser
from accel.launch.flags import GROUPS
from accel.settings import BY_NAME
from accel.settings.setting import typed

from . import test_flags
from .lines import given

ROOT = Path(__file__).parents[2]


class Row(NamedTuple):
    command: str
    options: str
    value: str
    default: str
    choices: str

    @property
    def spellings(self) -> list[str]:
        """As the table has them, and with `-` for `_`; none of a positional argument."""
        names = [name for name in self.options.split() if name.startswith("-")]
        return [*names, *(f"--{name[2:].replace('_', '-')}" for name in names if "_" in name)]

    @property
    def flag(self) -> str:
        return next((name for name in self.options.split() if name.startswith("--")), "")


with open(Path(__file__).with_name("accelerate_flags.tsv"), encoding="utf-8", newline="") as file:
    TABLE = [Row(**row) for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
LAUNCH = [row for row in TABLE if row.command == "launch" and row.flag]
OTHERS = [row for row in TABLE if row.command != "launch"]
SETTINGS = {setting.display_name: setting for group in GROUPS.values() for setting in group}

# The test of each option of the other commands, which uses it in one of its spellings.
EFFECTS = {
    "config --config_file": "tests.cli.test_config:written",
    "estimate-memory model_name": "tests.cli.test_estimate:test_the_table",
    "estimate-memory --library_name": "tests.cli.test_estimate:test_models_of_timm",
    "estimate-memory --dtypes": "tests.cli.test_estimate:test_the_table",
    "estimate-memory --trust_remote_code":
        "tests.cli.test_estimate:test_code_that_comes_with_a_model_runs_when_it_is_trusted",
    "env --config_file": "tests.cli.test_env:test_the_configuration_is_shown_without_its_secrets",
    "merge-weights checkpoint_directory": "tests.cli.test_merge:test_the_merged_file_loads",
    "merge-weights output_path": "tests.cli.test_merge:test_the_merged_file_loads",
    "merge-weights --unsafe_serialization": "tests.cli.test_merge:test_the_merged_file_loads",
    "merge-weights --remove_checkpoint_dir": "tests.cli.test_merge:test_the_checkpoint_is_removed_when_asked",
    "tpu-config --config_file": "tests.cli.test_tpu_config:test_what_is_not_given_stands_in_the_file",
    "tpu-config --tpu_name": "tests.cli.test_tpu_config:WHERE",
    "tpu-config --tpu_zone": "tests.cli.test_tpu_config:test_what_is_not_given_stands_in_the_file",
    "tpu-config --use_alpha": "tests.cli.test_tpu_config:test_alpha",
    "tpu-config --command_file": "tests.cli.test_tpu_config:test_what_is_not_given_stands_in_the_file",
    "tpu-config --command": "tests.cli.test_tpu_config:test_every_worker_runs_it",
    "tpu-config --install_accelerate": "tests.cli.test_tpu_config:test_versions",
    "tpu-config --accelerate_version": "tests.cli.test_tpu_config:test_versions",
    "tpu-config --debug": "tests.cli.test_tpu_config:test_debug_shows_and_does_nothing",
    "test --config_file": "tests.cli.test_selftest:test_the_settings_of_a_file_are_used_and_a_line_of_json_a_check",
    "to-fsdp2 --config_file": "tests.cli.test_fsdp2:test_it_is_rewritten",
    "to-fsdp2 --overwrite": "tests.cli.test_fsdp2:test_in_place_and_json",
    "to-fsdp2 --output_file": "tests.cli.test_fsdp2:test_it_is_rewritten",
}  # fmt: skip
# Where our default says the same in another way, or better: Accelerate's own is text, or names no value of the option.
OTHER_DEFAULTS = {"--no_tpu_cluster", "--fp8_override_linear_precision", "--fsdp_version"}


def test_the_table_is_whole() -> None:
    assert (len(LAUNCH), len(OTHERS)) == (122, 23)
    assert len(TABLE) == len({(row.command, row.options) for row in TABLE})


def sample(row: Row) -> str:
    """A word that the option takes; none for a switch."""
    setting = SETTINGS[row.flag]
    if setting.kind == "switch":
        return ""
    if setting.choices:
        return setting.choices[-1]
    kinds = {
        "whole": "3",
        "positive": "3",
        "number": "0.5",
        "seconds": "2",
        "yesno": "true",
        "yesnos": "true,false,true",
    }
    return kinds.get(setting.kind, "word")


@pytest.mark.parametrize("row", LAUNCH, ids=lambda row: row.flag)
def test_launch_takes_every_spelling(row: Row) -> None:
    word = [value] if (value := sample(row)) else []
    parsed = [given(spelling, *word) for spelling in row.spellings]
    assert parsed == [parsed[0]] * len(parsed)
    assert list(parsed[0]) == [SETTINGS[row.flag].name]
    if word:
        assert given(f"{row.flag}={word[0]}") == parsed[0]


@pytest.mark.parametrize("row", LAUNCH, ids=lambda row: row.flag)
def test_launch_has_its_choices_and_its_default(row: Row) -> None:
    setting = SETTINGS[row.flag]
    assert set(row.choices.split()) <= set(setting.choices) | {alias for alias, _ in setting.aliases}
    if row.flag not in OTHER_DEFAULTS:
        nothing = setting.default in (None, False) and row.default in ("None", "False", "false")
        assert (
            nothing
            or typed(setting, setting.default) == row.default.lower().replace("full_shard", "FULL_SHARD")
            or (typed(setting, setting.default) == row.default)
        )


@pytest.mark.parametrize("row", LAUNCH, ids=lambda row: row.flag)
def test_launch_has_a_test_of_what_it_does(row: Row) -> None:
    """In the worker's environment, the plan of the launch, or the command of another launcher."""
    tested = test_flags.ENVIRONMENT.keys() | test_flags.PLAN.keys() | test_flags.COMMANDS.keys() | test_flags.ELSEWHERE
    assert SETTINGS[row.flag].name in tested


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: f"{row.command} {row.options}")
def test_another_command_takes_it_and_has_a_test_of_what_it_does(row: Row) -> None:
    parser = Parser(row.command, "")
    importlib.import_module(COMMANDS[row.command][0]).add_arguments(parser)
    actions = {name: action for action in parser._actions for name in action.option_strings}
    if row.flag:
        action = actions[row.flag]
        many = action.nargs == "+"
        word = [] if action.nargs == 0 else [next(iter(action.choices or ["word"]))]
        rest = ["x"] * sum(not action.option_strings and action.nargs != "?" for action in parser._actions)
        needed = [w for a in parser._actions if a.required and a.option_strings and a is not action
                  for w in (a.option_strings[0], "w")]  # fmt: skip
        read = [vars(parser.read([*rest, *needed, spelling, *word])) for spelling in row.spellings]
        assert read == [read[0]] * len(read)
        assert read[0][action.dest] == (word if many else word[0] if word else True)
    module, _, name = EFFECTS[f"{row.command} {row.flag or row.options}"].partition(":")
    assert row.flag == "" or any(spelling in _text(module, name) for spelling in row.spellings)


def _text(module: str, name: str) -> str:
    """What stands there under that name; nothing is imported, for some of it needs packages that few people have."""
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        named = {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
        if name in {getattr(node, "name", None), *named}:
            return ast.get_source_segment(source, node) or ""
    raise KeyError(f"{module} has no {name}")


def test_nothing_else_is_a_flag_by_accident() -> None:
    """What Accelerate does not have is ours on purpose, and has its line here."""
    ours = {"--compat", "--explain", "--start_method", "--shutdown_timeout", "--rdzv_id", "--tpu_runtime",
            "--fsdp_activation_checkpointing_offload"}  # fmt: skip
    assert set(SETTINGS) - {row.flag for row in LAUNCH} == ours
    assert ours <= {BY_NAME[flag[2:]].display_name for flag in ours}
