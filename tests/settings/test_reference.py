"""The schema itself, and the pages that are made from it."""

from __future__ import annotations

from pathlib import Path

from accel.settings import BY_NAME, GROUPS
from accel.settings.base import KINDS, LAUNCHERS
from accel.settings.reference import pages
from accel.settings.values import read, typed

REFERENCE = Path(__file__).parents[2] / "docs/reference"


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
