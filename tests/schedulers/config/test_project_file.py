"""Which accel.yaml is a project's: how far up it is looked for, and whose files count."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from schedulers.config import named_targets
from schedulers.config.named_targets import config_files, known_targets, resolve_target, skipped_files
from schedulers.errors import UnknownTarget
from tests.needs import missing

OTHER, ANOTHER = 61_001, 61_002
as_root = pytest.mark.usefixtures("root")


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        missing("the right to give files away", "run as root")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for the file system's root, with nobody's home in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "no configuration"))
    monkeypatch.delenv("ACCEL_CONFIG_TRUST", raising=False)
    named_targets._warn_once.cache_clear()
    top = tmp_path / "top"
    top.mkdir()
    return top


def lay(top: Path, *paths: str) -> None:
    """Make files and directories (which end with `/`); each accel.yaml has a target named after its directory."""
    for path in paths:
        whole = top / path
        (whole if path.endswith("/") else whole.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            whole.write_text("targets: {" + f"from-{whole.parent.name}" + ": {kind: local}}\n")


def found(top: Path, start: str) -> list[str]:
    return [os.path.relpath(path, top) for path in config_files(top / start)]


@pytest.mark.parametrize(
    ("paths", "start", "expected"),
    [
        (["p/accel.yaml", "p/a/b/"], "p/a/b", ["p/accel.yaml"]),
        (["accel.yaml", "p/accel.yaml", "p/a/"], "p/a", ["p/accel.yaml"]),  # the nearest
        (["accel.yaml", "p/.git/", "p/a/"], "p/a", []),  # above the root of the work tree
        (["accel.yaml", "p/.git/", "p/accel.yaml", "p/a/"], "p/a", ["p/accel.yaml"]),
        (["accel.yaml", "p/.git", "p/a/"], "p/a", []),  # a work tree of `git worktree`, a submodule: .git is a file
        (["p/.git/", "p/accel.yaml", "p/sub/.git", "p/sub/a/"], "p/sub/a", []),
        (["accel.yaml", "../home/p/a/"], "../home/p/a", []),
        (["../accel.yaml", "../home/accel.yaml", "../home/p/a/"], "../home/p/a", ["../home/accel.yaml"]),
        (["../accel.yaml", "../home/p/a/"], "../home/p/a", []),  # above the home directory
        (["accel.yaml", "a/"], "a/missing/deeper", ["accel.yaml"]),
        (["accel.yaml/"], "", []),
    ],
)  # fmt: skip
def test_the_search_ends_at_the_projects_root(tree: Path, paths: list[str], start: str, expected: list[str]) -> None:
    lay(tree, *paths)
    assert found(tree, start) == expected


def test_the_users_configuration_directory_is_in_no_project(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tree, "a/.git/", "a/accel.yaml", "a/config/accel.yaml", "a/config/b/")
    assert found(tree, "a/config/b") == ["a/config/accel.yaml"]
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tree / "a/config"))
    assert found(tree, "a/config") == ["a/config/accel.yaml"]
    (tree / "a/config/accel.yaml").unlink()
    assert found(tree, "a/config") == []
    assert found(tree, "a") == ["a/accel.yaml"]


def test_without_a_root_the_search_stays_on_one_file_system(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tree, "accel.yaml", "disk/a/")
    assert found(tree, "disk/a") == ["accel.yaml"]
    inside = os.path.realpath(tree / "disk")
    monkeypatch.setattr(named_targets, "_device", lambda path: 2 if path.startswith(inside) else 1)
    assert found(tree, "disk/a") == []
    lay(tree, ".git/")
    assert found(tree, "disk/a") == ["accel.yaml"]  # a project may be mounted in parts


@as_root
@pytest.mark.parametrize(
    ("owners", "expected", "problem"),
    [
        ({}, ["team/p/accel.yaml"], ""),
        ({"team": OTHER, "team/p/a": OTHER}, ["team/p/accel.yaml"], ""),  # what has no file may be anybody's
        ({"team/p/accel.yaml": OTHER}, ["accel.yaml"], f"it belongs to user {OTHER}"),
        ({"team/p": OTHER}, ["accel.yaml"], f"its directory belongs to user {OTHER}"),
        ({"team/p/accel.yaml": OTHER, "accel.yaml": ANOTHER}, [], f"it belongs to user {ANOTHER}"),
    ],
)
def test_a_file_that_another_user_could_have_written_is_skipped(
    tree: Path, owners: dict[str, int], expected: list[str], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tree, "accel.yaml", "team/p/accel.yaml", "team/p/a/")
    for path, owner in owners.items():
        os.chown(tree / path, owner, -1)
    with caplog.at_level(logging.WARNING):
        assert found(tree, "team/p/a") == expected
        assert found(tree, "team/p/a") == expected
    skipped = sum(path.endswith("accel.yaml") or path == "team/p" for path in owners)
    assert len(caplog.messages) == skipped  # each of them once, however often the file is looked for
    assert (problem in caplog.messages[-1]) if skipped else not problem
    assert skipped_files(tree / "team/p/a") == caplog.messages


@pytest.mark.parametrize(
    ("place", "mode", "is_warned"),
    [
        ("p/accel.yaml", 0o666, True),
        ("p/accel.yaml", 0o664, False),
        ("p", 0o777, True),
        ("p", 0o1777, False),
        ("real", 0o777, True),  # where a link leads
    ],
)
def test_a_file_that_every_user_can_change_is_read_with_a_warning(
    place: str,
    mode: int,
    is_warned: bool,
    tree: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lay(tree, "p/accel.yaml", "p/a/", "real/")
    if place == "real":
        (tree / "p/accel.yaml").rename(tree / "real/x.yaml")
        (tree / "p/accel.yaml").symlink_to("../real/x.yaml")
    (tree / place).chmod(mode)
    assert found(tree, "p/a") == found(tree, "p/a") == ["p/accel.yaml"]
    assert [message.endswith(f"chmod o-w {tree / place}") for message in caplog.messages] == [True] * is_warned
    caplog.clear()
    named_targets._warn_once.cache_clear()
    monkeypatch.setenv("ACCEL_CONFIG_TRUST", str(tree))
    assert found(tree, "p/a") == ["p/accel.yaml"]
    assert not caplog.messages


@as_root
def test_an_ordinary_user_takes_roots_files_and_no_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tree, "accel.yaml", "p/accel.yaml", "p/a/")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert found(tree, "p/a") == ["p/accel.yaml"]  # root's
    os.chown(tree / "p", OTHER, -1)
    os.chown(tree / "p/accel.yaml", OTHER, -1)
    assert found(tree, "p/a") == ["p/accel.yaml"]
    os.chown(tree / "p/accel.yaml", ANOTHER, -1)
    assert found(tree, "p/a") == ["accel.yaml"]


@as_root
def test_a_link_counts_by_its_own_owner_and_by_the_files(tree: Path) -> None:
    lay(tree, "p/", "elsewhere/accel.yaml")
    (tree / "p/accel.yaml").symlink_to("../elsewhere/accel.yaml")
    assert found(tree, "p") == ["p/accel.yaml"]
    os.chown(tree / "p/accel.yaml", OTHER, -1, follow_symlinks=False)
    assert found(tree, "p") == []
    os.chown(tree / "p/accel.yaml", 0, -1, follow_symlinks=False)
    os.chown(tree / "elsewhere/accel.yaml", OTHER, -1)
    assert found(tree, "p") == []


@as_root
@pytest.mark.parametrize(
    ("trusted", "expected"),
    [
        ("{top}/p/accel.yaml", True),
        ("{top}/p", True),
        ("{top}", True),
        ("/nowhere:{top}/link/", True),
        ("{top}/p/accel", False),
        ("{top}/p/a", False),
        ("", False),
    ],
)
def test_a_path_may_be_accepted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, trusted: str, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tree, "p/accel.yaml", "p/a/")
    (tree / "link").symlink_to("p")
    os.chown(tree / "p/accel.yaml", OTHER, -1)
    monkeypatch.setenv("ACCEL_CONFIG_TRUST", trusted.format(top=tree))
    assert found(tree, "p/a") == (["p/accel.yaml"] if expected else [])
    assert len(caplog.messages) == (not expected)


@as_root
def test_the_warning_gives_the_line_that_accepts_the_file(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay(tree, "my project/accel.yaml")
    os.chown(tree / "my project/accel.yaml", OTHER, -1)
    start = tree / "my project"
    with pytest.raises(UnknownTarget):
        resolve_target("from-my project", Path("/jobs"), start=start)
    path = f"{tree}/my project/accel.yaml"
    assert caplog.messages == [
        f"{path}: skipped: it belongs to user {OTHER}, neither you nor root. "
        f"Set ACCEL_CONFIG_TRUST='{path}' to accept it"
    ]
    monkeypatch.setenv("ACCEL_CONFIG_TRUST", path)
    assert "from-my project" in {target.name for target in known_targets(start)}


def test_a_target_knows_the_file_and_line_that_describe_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    (tree / named_targets.FILE).write_text("targets:\n\n  lab: {kind: local}\n")
    assert resolve_target("lab", tree / "jobs").source == f"{tree}/accel.yaml:3"
    assert resolve_target("local", tree / "jobs").source == ""
