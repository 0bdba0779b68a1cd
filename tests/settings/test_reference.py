"""The schema itself, and the pages that are made from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel.cli import main
from accel.cli.arguments import Parser
from accel.cli.launch import resolve_settings
from accel.launch.flags import add_arguments
from accel.settings import BY_NAME, GROUPS
from accel.settings.reference import pages
from accel.settings.setting import KINDS, LAUNCHERS, read, typed

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def test_the_pages_are_up_to_date() -> None:
    """`python -m accel.settings.reference docs/reference` renews them."""
    assert {name: (REFERENCE / name).read_text() for name in pages()} == pages()


def test_every_setting_is_described_once() -> None:
    names = [setting.name for group in GROUPS for setting in group.settings]
    assert len(names) == len(set(names)) == len(BY_NAME)
    keys = [(group.section, s.file_key) for group in GROUPS for s in group.settings if s.file_key]
    assert len(keys) == len(set(keys))
    flags = [spelling for s in BY_NAME.values() if s.flag for spelling in s.spellings()]
    assert len(flags) == len(set(flags))


def test_help_imports_nothing_heavy() -> None:
    """`accel launch --help` costs no more than argparse and the schema: no torch, no YAML, no `inspect`."""
    code = "import sys, accel.cli\ntry:\n    accel.cli.main(['launch', '--help'])\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    heavy = {"torch", "numpy", "yaml", "json", "dataclasses", "inspect", "subprocess", "pathlib", "difflib", "rich"}
    assert heavy.isdisjoint(loaded)
    assert "accel.launch.run" not in loaded


def test_every_row_is_whole() -> None:
    for setting in BY_NAME.values():
        assert setting.help, setting.name
        assert setting.kind in KINDS, setting.name
        assert set(setting.used_by) <= LAUNCHERS.keys(), setting.name
        assert setting.when is None or setting.when[0] in BY_NAME, setting.name


def test_a_default_is_a_value_of_its_setting() -> None:
    for setting in BY_NAME.values():
        if setting.default not in (None, ""):
            assert read(setting, typed(setting, setting.default)) == setting.default, setting.name


@pytest.mark.usefixtures("somewhere", "gpus")
def test_every_group_of_flags_has_an_example_that_holds(somewhere: Path) -> None:
    (somewhere / "sagemaker.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n")
    for group in GROUPS:
        flags = [setting for setting in group.settings if setting.flag]
        if flags:
            words = group.example.split()
            parser = Parser("launch", "")
            add_arguments(parser, defaults_too=False)
            args, program = parser.read_before_script(words)
            assert program, group.title
            resolve_settings(vars(args), {})
            assert group.title == "Amazon SageMaker" or {setting.name for setting in flags} & vars(args).keys()


def test_help_has_its_groups_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for group in GROUPS:
        if any(setting.flag for setting in group.settings):
            assert f"\n{group.title}:\n  {group.description}\n  Example: accel launch {group.example}\n" in shown
    assert all(setting.display_name in shown for setting in BY_NAME.values() if setting.flag)
    assert max(map(len, shown.splitlines())) < 120
