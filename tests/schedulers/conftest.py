"""A store and a project for each test; and hosts, mended between tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.fixtures import _cluster, _hosts, _with_accounting, _without_accounting
from tests.clusters.ssh import SshHosts
from tests.needs import missing

__all__ = ["_cluster", "_hosts", "_with_accounting", "_without_accounting"]


@pytest.fixture
def ssh_hosts(_hosts: SshHosts) -> Iterator[SshHosts]:
    """node1 … node4, as they were before any test broke them."""
    try:
        yield _hosts
    finally:
        _hosts.heal()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the store is, and the directories of the jobs with it."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory whose name would break any command line that was put together as text."""
    directory = tmp_path / 'it\'s a "pro ject"; $(x) %j'
    directory.mkdir()
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 768 kB."""
    if os.geteuid() != 0:
        missing("the right to mount a file system", "run as root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        missing(f"a tmpfs ({mounted.stderr.strip()})", "run where root may mount one")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
