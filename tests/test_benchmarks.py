"""The figures in the README and the documentation are the kept ones, and each result names the commit measured."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.__main__ import ALL
from benchmarks.measure import RESULTS
from benchmarks.tables import FILES, ROOT, TABLES, renewed


@pytest.mark.parametrize("name", FILES)
def test_tables_show_the_kept_figures(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text == renewed(text), "python -m benchmarks.tables"


def test_pages_that_name_a_benchmark_have_tables() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {page.relative_to(ROOT).as_posix() for page in pages if "python -m benchmarks" in page.read_text()}
    assert named <= set(FILES)


def test_every_table_is_shown() -> None:
    shown = {name for file in FILES for name in re.findall(r"<!-- benchmarks (\w+) -->", (ROOT / file).read_text())}
    assert shown == set(TABLES)


@pytest.mark.parametrize("name", ALL)
def test_every_result_is_kept_and_names_its_commit(name: str) -> None:
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", kept["commit"])
