"""The ratchet of tests/budget.toml: what it measures, what it refuses, and that this tree keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import budget

SOURCE = '''"""Whether it runs."""
# why
from accel import one


class Report:
    """Return nothing."""

    def write(self) -> None:
        """How it is written."""
        from .pages import page
        import schedulers.job
        import json

        found = json.dumps(page)
        sought = found
'''
WORDS = {"openings": ["Whether", "How"], "locals": ["found"]}


def figures() -> budget.Figures:
    root = budget.ROOT
    sources = {
        root / "accel/cli/a.py": SOURCE,
        root / "accel/cli/image/b.py": "class Report: ...\n",
        root / "accel/c.py": "",
    }
    return budget.measure(WORDS, sources, {root / "tests/test_a.py": "pass\n" * 3})


def as_budget(measured: budget.Figures) -> dict[str, dict[str, object]]:
    packages = {name: {"modules": modules, "lines": lines} for name, (modules, lines) in measured.packages.items()}
    return {"packages": dict(packages), "whole": dict(measured.whole)}


def test_the_figures_of_a_tree() -> None:
    assert figures() == budget.Figures(
        {"accel/*.py": (1, 0), "accel/cli": (2, 17)},
        {"odd_docstrings": 2, "shared_class_names": 1, "imports_in_functions": 2, "dialect_locals": 1,
         "comment_percent": 5.9, "small_modules": 3,
            "product_lines": 17,
            "test_lines": 3},
    )  # fmt: skip


def test_a_worse_figure_fails_with_the_line_to_write() -> None:
    measured = figures()
    limits = as_budget(measured)
    assert budget.compare(limits, measured) == []
    worse = replace(measured, packages={**measured.packages, "accel/cli": (2, 18), "accel/new": (1, 5)},
                    whole={**measured.whole, "dialect_locals": 2, "comment_percent": 5.8})  # fmt: skip
    assert budget.compare(limits, worse) == [
        'accel/cli grew from 2 modules and 17 lines; write: "accel/cli" = { modules = 2, lines = 18 }',
        'accel/new grew from 0 modules and 0 lines; write: "accel/new" = { modules = 1, lines = 5 }',
        "dialect_locals is worse than 1; write: dialect_locals = 2",
        "comment_percent is worse than 5.9; write: comment_percent = 5.8",
    ]


def test_a_limit_that_became_stale_fails() -> None:
    measured = replace(figures(), packages={"accel/cli": (2, 117)})
    limits = as_budget(measured)
    assert budget.compare(limits, replace(measured, packages={"accel/cli": (2, 117 - budget.SLACK_LINES)})) == []
    better = replace(measured, packages={"accel/cli": (1, 117)}, whole={**measured.whole, "odd_docstrings": 1})
    assert budget.compare(limits, better) == [
        'accel/cli shrank from 2 modules and 117 lines; write: "accel/cli" = { modules = 1, lines = 117 }',
        "odd_docstrings is better than 2; write: odd_docstrings = 1",
    ]
    assert budget.compare(limits, replace(measured, packages={})) == ["accel/cli has no modules; delete its line"]


def test_written_figures_are_kept_figures(tmp_path: Path) -> None:
    measured = figures()
    file = tmp_path / "budget.toml"
    file.write_text(budget.render(budget.BUDGET.read_text(), measured))
    assert budget.compare(budget.load(file), measured) == []
    assert budget.load(file)["words"] == budget.load()["words"]


def test_this_tree_keeps_its_budget() -> None:
    limits = budget.load()
    assert budget.compare(limits, budget.current(limits)) == []
