"""Which files are in a snapshot where there is git: a real repository, with everything that makes one difficult."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from schedulers.errors import SnapshotError
from schedulers.store.snapshot import pack

from .test_snapshot import HOSTILE, code, home, names, write

__all__ = ["code", "home"]


@pytest.fixture
def repository(code: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git(code, "init", "-q")
    return code


def git(directory: Path, *words: str) -> None:
    identity = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True)


def test_git_decides_uncommitted_work_included(repository: Path, home: Path) -> None:
    write(repository, ".gitignore", "*.log\n/data/\n")
    write(repository, "committed.py", "old")
    write(repository, "deleted.py")
    write(repository, "ignored but tracked.log")
    git(repository, "add", "-f", ".")
    git(repository, "commit", "-qm", "1")
    write(repository, "committed.py", "new")
    (repository / "deleted.py").unlink()
    write(repository, "staged.py")
    git(repository, "add", "staged.py")
    write(repository, "untracked/new.py")
    write(repository, "run.log")
    write(repository, "data/huge")
    for name in HOSTILE:
        write(repository, f"hostile/{name}")
    (repository / "link").symlink_to("committed.py")
    snapshot = pack(repository, home)
    assert sorted(names(snapshot)) == sorted(
        [".gitignore", "committed.py", "ignored but tracked.log", "link", "staged.py", "untracked/new.py"]
        + [f"hostile/{name}" for name in HOSTILE]
    )
    with tarfile.open(snapshot.path) as tar:
        content = tar.extractfile("committed.py")
        assert content is not None
        assert content.read() == b"new"


def test_a_directory_inside_a_repository(repository: Path, home: Path) -> None:
    write(repository, "top.py")
    write(repository, "part/inner.py")
    git(repository, "add", ".")
    write(repository, "part/new.py")
    assert names(pack(repository / "part", home)) == ["inner.py", "new.py"]


def test_submodules_and_nested_repositories(repository: Path, home: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    write(library, "lib.py")
    write(library, ".gitignore", "*.o\n")
    git(library, "init", "-q")
    git(library, "add", ".")
    git(library, "commit", "-qm", "1")
    git(repository, "submodule", "add", "-q", str(library), "vendor/lib")
    git(repository, "submodule", "add", "-q", str(library), "vendor/absent")
    git(repository, "commit", "-qm", "1")
    git(repository, "submodule", "deinit", "-f", "vendor/absent")
    write(repository, "vendor/lib/untracked.py")
    write(repository, "vendor/lib/built.o")
    write(repository, "nested/inner.py")
    git(repository / "nested", "init", "-q")
    snapshot = pack(repository, home)
    assert names(snapshot) == [
        ".gitmodules",
        "nested/inner.py",
        "vendor/lib/.gitignore",
        "vendor/lib/lib.py",
        "vendor/lib/untracked.py",
    ]
    assert [warning.split(":")[0] for warning in snapshot.warnings] == ["'vendor/absent' is an empty directory"]


def test_a_conflict_lists_a_file_once(repository: Path, home: Path) -> None:
    write(repository, "a", "base")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "base")
    git(repository, "checkout", "-qb", "other")
    write(repository, "a", "other")
    git(repository, "commit", "-qam", "other")
    git(repository, "checkout", "-q", "-")
    write(repository, "a", "mine")
    git(repository, "commit", "-qam", "mine")
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "merge", "other")
    assert names(pack(repository, home)) == ["a"]


def test_what_lies_below_a_link_now_is_deleted_for_git_and_for_us(repository: Path, home: Path, tmp_path: Path) -> None:
    write(repository, "a/file", "mine")
    git(repository, "add", ".")
    (repository / "a/file").unlink()
    (repository / "a").rmdir()
    write(repository, "b/file", "another")
    (repository / "a").symlink_to("b")
    assert names(pack(repository, home)) == ["a", "b/file"]


def test_a_project_that_another_repository_ignores(repository: Path, home: Path) -> None:
    write(repository, ".gitignore", "*\n")
    write(repository, "project/train.py")
    assert names(pack(repository / "project", home)) == ["train.py"]


def test_a_hooks_environment_does_not_lead_git_astray(
    repository: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, "a.py")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert names(pack(repository, home)) == ["a.py"]


def test_a_git_that_refuses_is_quoted(repository: Path, home: Path) -> None:
    write(repository, "a.py")
    git(repository, "add", ".")
    (repository / ".git/index").write_bytes(b"rubbish")
    with pytest.raises(SnapshotError, match=r"^git cannot list the files of .*: .*index[^\n]*$"):
        pack(repository, home)


def test_a_missing_git_is_said(repository: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(SnapshotError, match="install git"):
        pack(repository, home)


def test_an_untracked_secret_is_left_out_and_a_tracked_one_shipped_both_with_a_warning(
    repository: Path, home: Path
) -> None:
    write(repository, "keys/ca.pem")
    git(repository, "add", ".")
    for path in ("a.py", ".env", ".ssh/config", "sub/id_rsa"):
        write(repository, path)
    snapshot = pack(repository, home)
    assert names(snapshot) == ["a.py", "keys/ca.pem"]
    assert snapshot.warnings == (
        "'.env', '.ssh/config', 'sub/id_rsa': left out, hidden or named like secrets. To ship one, "
        "add `!NAME` to .accelignore",
        "'keys/ca.pem': named like secrets, and shipped, as git tracks them. "
        "To leave one out, add its name to .accelignore",
    )


def test_accelignore_counts_in_git_too(repository: Path, home: Path) -> None:
    write(repository, ".gitignore", "*.log\n")
    write(repository, "weights/large.bin")
    write(repository, "keys/ca.pem")
    write(repository, "keys/old.pem")
    git(repository, "add", ".")
    write(repository, ".accelignore", "weights/\nnotes.txt\n!.env\n!ca.pem\nold.pem\n")
    for path in ("a.py", "notes.txt", ".env", "run.log"):
        write(repository, path)
    snapshot = pack(repository, home)
    assert names(snapshot) == [".accelignore", ".env", ".gitignore", "a.py", "keys/ca.pem"]
    assert snapshot.warnings == (
        "'.env', 'keys/ca.pem': named like secrets, and shipped, as `!NAME` in .accelignore includes them again",
    )


def test_a_link_that_is_refused_names_a_remedy_that_works(repository: Path, home: Path) -> None:
    write(repository, "a.py")
    (repository / "data").symlink_to("/datasets")
    git(repository, "add", ".")
    with pytest.raises(SnapshotError, match=r"add it to \.accelignore$"):
        pack(repository, home)
    write(repository, ".accelignore", "data\n")
    assert names(pack(repository, home)) == [".accelignore", "a.py"]


def test_a_secret_in_a_nested_repository(repository: Path, home: Path) -> None:
    write(repository, "nested/lib.py")
    write(repository, "nested/known.pem")
    git(repository / "nested", "init", "-q")
    git(repository / "nested", "add", ".")
    write(repository, "nested/.env")
    snapshot = pack(repository, home)
    assert names(snapshot) == ["nested/known.pem", "nested/lib.py"]
    assert ["nested/.env" in snapshot.warnings[0], "nested/known.pem" in snapshot.warnings[1]] == [True, True]


def test_what_accel_keeps_itself_is_never_shipped(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, "runs/accel/jobs/1/secrets.json")
    write(repository, "a.py")
    git(repository, "add", ".")  # whatever git has to say
    assert names(pack(repository, repository / "runs/accel")) == ["a.py"]
    (repository / "link").symlink_to("runs/accel")
    monkeypatch.setenv("ACCEL_HOME", str(repository / "link"))
    assert names(pack(repository, tmp_path / "another home")) == ["a.py", "link"]
