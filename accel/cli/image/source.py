"""The source of a project (commit and remote), for an image's labels."""

from __future__ import annotations

import subprocess
from pathlib import Path

from schedulers.printable import without_password
from schedulers.store.source_files import git_environment


def revision(directory: Path) -> str:
    """Return the commit, with `-dirty` for a changed work tree; "" without git or a first commit."""
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit}-dirty" if _git(directory, "status", "--porcelain", "--", ".") else commit


def url(directory: Path) -> str:
    """Return the remote `origin` without user and password, or ""."""
    return without_password(_git(directory, "remote", "get-url", "origin"))


def _git(directory: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(directory), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=git_environment(),
        )
    except FileNotFoundError:
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
