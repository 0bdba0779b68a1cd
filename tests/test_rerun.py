"""`python -m tests.rerun`: what fails beside others runs once more, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Fails in a worker of several, and so beside others.
RACE = """
import os
import pytest

@pytest.mark.parametrize("name", ["a b", "x::y"])
def test_race(name):
    print("heard", name)
    assert "PYTEST_XDIST_WORKER" not in os.environ, "beside others"

def test_sound():
    pass
"""


def rerun(here: Path, text: str, *, ci: str = "1") -> tuple[int, str]:
    (here / "test_it.py").write_text(text)
    (here / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    words = [sys.executable, "-m", "tests.rerun", "-p", "xdist.plugin", "-n", "1", "test_it.py"]
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_what_failed_beside_others_and_passes_alone_is_named_and_the_run_passes(tmp_path: Path) -> None:
    code, said = rerun(tmp_path, RACE)
    assert code == 0, said
    report = said[said.index("failed beside others, passed alone:") :]
    assert "test_it.py::test_race[a b]\n" in report
    assert "test_it.py::test_race[x::y]\n" in report
    assert "test_sound" not in report
    assert "AssertionError: beside others" in report
    kept = tmp_path / "build/failed-beside-others.txt"
    assert report == f"{kept.read_text()}(also in build/failed-beside-others.txt)\n"


@pytest.mark.parametrize(
    ("text", "ci"),
    [
        (RACE, ""),
        (RACE + "    assert False\n", "1"),
        (RACE.replace('["a b", "x::y"]', "range(11)"), "1"),
        (RACE + "import no_such_module\n", "1"),
    ],
    ids=["not in CI", "fails alone too", "too many", "collection"],
)
def test_any_other_failure_fails_the_run(tmp_path: Path, text: str, ci: str) -> None:
    code, said = rerun(tmp_path, text, ci=ci)
    assert code != 0
    assert "failed beside others, passed alone:" not in said
    assert not (tmp_path / "build").exists()
    assert ("once more, alone:" in said) == ("assert False" in text)
