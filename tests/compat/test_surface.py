"""Everything public of Accelerate 1.15 is here with its signature, or stands in docs/migrating.md with a reason."""

from __future__ import annotations

import inspect
import json
import re
from fnmatch import fnmatchcase

import pytest

from tests.compat.children import ROOT, said
from tests.compat.surface import SURFACE, Argument, compare, parse

_HEADING = "## What is not here"
# The launcher sets variables for Accelerate's own runtime: that is not to read them.
_ONLY_SET = (
    *(f"accel/settings/{name}.py" for name in ("schema", "env_variables")),
    "accel/cli/launch_defaults.py",
    "accel/launch/external.py",
)
_BY_PREFIX = "ACCELERATE_DYNAMO_"  # which the plug-in puts before the names of its fields
_SOURCES = [
    path
    for folder in ("accel", "schedulers")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).as_posix() not in _ONLY_SET
]


def rows() -> dict[str, str]:
    """The names in the tables of the document, each with its reason."""
    text = (ROOT / "docs" / "migrating.md").read_text().partition(_HEADING)[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2 and "`" in cells[0]:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in found, f"{name} stands there twice"
                found[name] = cells[1]
    return found


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    printed = said("-m", "accel.compat", str(ROOT / "tests" / "compat" / "surface.py"))
    found: dict[str, str] = json.loads(printed.splitlines()[-1])
    text = "\n".join(path.read_text() for path in _SOURCES if path.name not in ("constants.py", "unbuilt.py"))
    for variable in SURFACE["env_vars"]:
        if variable not in text and not variable.startswith(_BY_PREFIX):
            found[f"${variable}"] = "is read nowhere"
    return found


def test_what_differs_is_written_down(differences: dict[str, str]) -> None:
    known = rows()
    told = [name for name in differences if any(fnmatchcase(name, row) for row in known)]
    assert {name: differences[name] for name in differences if name not in told} == {}


def test_what_is_written_down_differs(differences: dict[str, str]) -> None:
    assert [row for row in rows() if not any(fnmatchcase(name, row) for name in differences)] == []


def test_every_row_has_a_reason() -> None:
    assert rows()
    assert [name for name, reason in rows().items() if len(reason.split()) < 3] == []


def test_a_signatures_text_is_read() -> None:
    text = "(self, a: Union[int, str] = None, *items, b: dict = {'x': (1, 2)}, c='d, e', **rest) -> list[int]"
    assert parse(text) == [
        Argument("self"),
        Argument("a", "None"),
        Argument("*items"),
        Argument("b", "{'x': (1, 2)}"),
        Argument("c", "'d, e'"),
        Argument("**rest"),
    ]


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        (lambda a, b=1: None, ""),
        (lambda a, b=1, *, more=None: None, ""),
        (lambda a, b=2: None, "b=2, not 1"),
        (lambda a, b: None, "needs b"),
        (lambda b, a=1: None, "takes (b, a), not (a, b)"),
        (lambda a, b=1, c=None: None, "takes (a, b, c), not (a, b)"),
    ],
)
def test_signatures_are_compared(ours: object, why: str) -> None:
    assert callable(ours)
    assert compare(parse("(a, b=1)"), list(inspect.signature(ours).parameters.values())) == why
