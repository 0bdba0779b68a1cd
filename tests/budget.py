"""A ratchet for the size and the words of the code: `budget.toml` holds each figure's limit.

    python -m tests.budget            fails if a figure is worse than its limit, or if a limit is stale
    python -m tests.budget --write    writes the figures of this tree into budget.toml

A change that raises a figure writes the new limit, so that a reader sees the raise in its diff.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "tests/budget.toml"
PRODUCT = ("accel", "schedulers")
# Lines that a package or the tests may shrink by before the limit must be lowered: small edits leave the budget alone.
SLACK_LINES = 50
SMALL_LINES = 60  # a module with fewer is counted as small
_Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """The measured figures. `packages`: name -> (modules, lines); modules in no package count as `accel/*.py`."""

    packages: dict[str, tuple[int, int]] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)


def load(path: Path = BUDGET) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: dict[str, Any] = toml.loads(path.read_text())
    return content


def list_files(*patterns: str) -> list[Path]:
    """Return the files that git tracks, or will with the next `git add`, and that match any of the git pathspecs."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listing = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name.decode() for name in listing.split(b"\0") if name]
    return [path for path in paths if path.exists()]


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return f"{parts[0]}/{parts[1]}" if len(parts) > 2 else f"{parts[0]}/*.py"


def measure(words: dict[str, list[str]], sources: dict[Path, str], tests: dict[Path, str]) -> Figures:
    """Measure the product's `sources` and the `tests`.

    words: the first words of docstrings (`openings`) and the names of local variables (`locals`) to count.
    """
    opening = re.compile(rf"\W*({'|'.join(words['openings'])})\b")
    dialect = frozenset(words["locals"])
    openings = names = comments = lines = imports = small = 0
    classes: Counter[str] = Counter()
    packages: dict[str, tuple[int, int]] = {}
    for path, text in sources.items():
        count = text.count("\n")
        modules, package_lines = packages.get(package_of(path), (0, 0))
        packages[package_of(path)] = (modules + 1, package_lines + count)
        lines += count
        small += count < SMALL_LINES and path.name != "__init__.py"
        comments += sum(line.lstrip().startswith("#") for line in text.splitlines())
        tree = ast.parse(text)
        imports += len(set(_own_imports_in_functions(tree)))
        for node in ast.walk(tree):
            if isinstance(node, _Documented):
                openings += bool(opening.match(ast.get_docstring(node) or ""))
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names += node.id in dialect
    return Figures(
        dict(sorted(packages.items())),
        {
            "odd_docstrings": openings,
            "shared_class_names": sum(number > 1 for number in classes.values()),
            "imports_in_functions": imports,
            "dialect_locals": names,
            "comment_percent": round(100 * comments / lines, 1),
            "small_modules": small,
            "product_lines": lines,
            "test_lines": sum(text.count("\n") for text in tests.values()),
        },
    )


def _own_imports_in_functions(tree: ast.Module) -> Iterator[ast.stmt]:
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    own = node.level > 0 or (node.module or "").partition(".")[0] in PRODUCT
                else:
                    own = isinstance(node, ast.Import) and node.names[0].name.partition(".")[0] in PRODUCT
                if own and isinstance(node, ast.stmt):
                    yield node


def compare(budget: dict[str, Any], figures: Figures) -> list[str]:
    """Return a line for each figure that is worse than its limit, or better by more than the slack."""
    problems = []
    for name, (modules, lines) in figures.packages.items():
        limit = budget["packages"].get(name, {"modules": 0, "lines": 0})
        row = f'"{name}" = {{ modules = {modules}, lines = {lines} }}'
        if modules > limit["modules"] or lines > limit["lines"]:
            problems.append(f"{name} grew from {limit['modules']} modules and {limit['lines']} lines; write: {row}")
        elif modules < limit["modules"] or lines < limit["lines"] - SLACK_LINES:
            problems.append(f"{name} shrank from {limit['modules']} modules and {limit['lines']} lines; write: {row}")
    problems += [
        f"{name} has no modules; delete its line" for name in budget["packages"].keys() - figures.packages.keys()
    ]
    for name, value in figures.whole.items():
        limit = budget["whole"][name]
        slack = SLACK_LINES if name.endswith("lines") else 0
        rising_is_good = name == "comment_percent"
        if value > limit or value < limit - slack:
            better = (value > limit) == rising_is_good
            problems.append(f"{name} is {'better' if better else 'worse'} than {limit}; write: {name} = {value}")
    return problems


def render(text: str, figures: Figures) -> str:
    """Return the budget's `text` with the figures' values in [packages] and [whole]."""
    rows = [
        f'"{name}" = {{ modules = {modules}, lines = {lines} }}' for name, (modules, lines) in figures.packages.items()
    ]
    text = re.sub(r"(?ms)^(\[packages\]\n).*?(?=^\[)", lambda match: match[1] + "\n".join(rows) + "\n\n", text)
    for name, value in figures.whole.items():
        text = re.sub(rf"(?m)^{name} = [\d.]+", f"{name} = {value}", text)
    return text


def current(budget: dict[str, Any]) -> Figures:
    sources = {path: path.read_text() for path in list_files(*(f"{package}/*.py" for package in PRODUCT))}
    return measure(budget["words"], sources, {path: path.read_text() for path in list_files("tests/*.py")})


def main(arguments: list[str]) -> int:
    budget = load()
    figures = current(budget)
    if arguments == ["--write"]:
        BUDGET.write_text(render(BUDGET.read_text(), figures))
        return 0
    problems = compare(budget, figures)
    for problem in problems:
        print(f"tests/budget.toml: {problem}", file=sys.stderr)
    if problems:
        print("python -m tests.budget --write writes all of them", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
