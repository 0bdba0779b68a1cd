"""The command line and local jobs on other versions of Python, with the packages of the base install alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.marks import long

from ..cached import directory
from .conftest import ROOT, Accel
from .test_local import (
    Gate,
    gate,
    test_cancel_ends_the_job_and_may_be_said_twice,
    test_every_word_after_the_script_reaches_it,
    test_follow_gives_the_jobs_bytes_and_its_exit_code,
    test_list_is_plain_in_a_pipe_and_a_table_on_a_terminal,
    test_prune_deletes_packed_code_that_no_job_uses,
)

__all__ = [
    "Gate",
    "gate",
    "test_cancel_ends_the_job_and_may_be_said_twice",
    "test_every_word_after_the_script_reaches_it",
    "test_follow_gives_the_jobs_bytes_and_its_exit_code",
    "test_list_is_plain_in_a_pipe_and_a_table_on_a_terminal",
    "test_prune_deletes_packed_code_that_no_job_uses",
]


@dataclass(frozen=True)
class OnVersion(Accel):
    python: str

    def command(self, *argv: str) -> list[str]:
        return [self.python, "-m", "accel", *argv]


@pytest.fixture(scope="module", params=["3.10", *long("3.13")])
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter of an environment with the base install's packages, made once for each user."""
    version: str = request.param
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"all other tests run on Python {version}")
    base = _find(version)
    if base is None:
        # In CI too: Debian has one version of Python, and the others are no packages of it.
        pytest.skip(f"python{version} is missing: put one into the PATH (pyenv install {version})")
    packages = _packages()
    environment = directory(f"python-{version}", (base, packages), lambda place: _make(place, base, packages))
    return str(environment / "bin/python")


@pytest.fixture
def accel(python: str, tmp_path: Path) -> Iterator[Accel]:
    (tmp_path / "here").mkdir()
    runner = OnVersion(here=tmp_path / "here", home=tmp_path / "home", python=python)
    yield runner
    left = [
        line.split("\t")[0] for state in ("queued", "running") for line in runner("list", "--state", state).splitlines()
    ]
    if left:
        runner.finish("cancel", *left)


IMPORT_ALL = """
import importlib, pkgutil, sys
for package in ("schedulers", "accel.cli", "accel.settings"):
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] in ("schedulers", "accel"):
                raise
print(len([name for name in sys.modules if name.startswith(("schedulers.", "accel."))]))
"""


def test_every_module_that_needs_no_optional_package_can_be_imported(python: str) -> None:
    done = subprocess.run([python, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


def _find(version: str) -> str | None:
    """The interpreter of that version: in the PATH, or made by pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for candidate in (f"python{version}", *map(str, sorted(versions.glob(f"{version}.*/bin/python")))):
        asked = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", asked], capture_output=True, text=True)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.split()[1:] == [version]:
            return done.stdout.split()[0]
    return None


def _packages() -> list[str]:
    """What the base install needs, as pyproject.toml has it."""
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'^\s*"(.+)",$', listed, re.MULTILINE)


def _make(environment: Path, base: str, packages: list[str]) -> None:
    subprocess.run([base, "-m", "venv", "--without-pip", environment], check=True)
    # Without constraints.txt: not all of its versions know every Python.
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install", "-q"]
    subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
