"""The documents' examples run: a fence that names a file writes it, and every `sh` fence is run, line by line.

`console` fences are for people: they need another machine, or a fresh one.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import long

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]+)")


def fences(document: Path) -> list[tuple[str, str, str]]:
    """(language, file name, text) of every fence."""
    found = []
    for match in FENCE.finditer(document.read_text()):
        language, _, name = match["info"].strip().partition(" ")
        found.append((language, name, match["body"]))
    return found


# Whose examples take minutes together. `make test-affected` runs those of a document that was changed.
MINUTES = {
    "accelerator.md", "big_models.md", "checkpoints.md", "compat.md", "data.md", "migrating.md", "parallel.md",
    "processes.md", "tracking.md", "training.md",
}  # fmt: skip


@pytest.mark.parametrize(
    "document",
    [long(d)[0] if d.name in MINUTES else d for d in DOCUMENTS if any(f[0] == "sh" for f in fences(d))],
    ids=lambda path: path.name,
)
def test_examples_run(document: Path, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "ACCEL_HOME": str(tmp_path / "home"),
        "ACCEL_CONFIG_HOME": str(tmp_path / "config"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    project = tmp_path / "project"
    project.mkdir()
    for language, name, body in fences(document):
        if name:
            (project / name).write_text(body)
        elif language == "sh":
            for line in body.splitlines():
                done = subprocess.run(["bash", "-c", line], cwd=project, env=env, capture_output=True, timeout=280)
                said = (done.stdout + done.stderr).decode(errors="replace")
                assert done.returncode == 0, f"{document.name}: {line}\n{said}"


def test_each_submit_of_the_readme_is_accepted(tmp_path: Path) -> None:
    texts = fences(ROOT / "README.md")
    for _, name, body in texts:
        if name:
            (tmp_path / name).write_text(body)
    submits = [line[2:] for language, _, body in texts if language == "console" for line in body.splitlines()
               if line.startswith("$ accel submit ")]  # fmt: skip
    assert len(submits) == 6
    env = {**os.environ, "ACCEL_HOME": str(tmp_path / "home"), "ACCEL_CONFIG_HOME": str(tmp_path / "config")}
    for line in submits:
        argv = shlex.split(line.replace("submit", "submit --dry-run", 1), comments=True)
        completed = subprocess.run([sys.executable, "-m", *argv], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert completed.returncode == 0, f"{line}\n{completed.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    missing = [m["path"] for m in LINK.finditer(document.read_text()) if not (document.parent / m["path"]).exists()]
    assert missing == []


def test_every_dependency_has_its_reason() -> None:
    reasons = (ROOT / "docs/dependencies.md").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    names = re.findall(r'"([A-Za-z0-9_-]+)', block[1])
    assert names
    assert [name for name in names if f"| {name}" not in reasons] == []


def test_every_flag_of_launch_that_the_documents_name_exists() -> None:
    from accel.launch.flags import GROUPS

    known = {spelling for options in GROUPS.values() for option in options for spelling in option.spellings()}
    text = (ROOT / "docs/launch.md").read_text()
    assert set(re.findall(r"--[a-z]+(?:_[a-z]+)+", text)) <= known
