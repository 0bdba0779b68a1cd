"""A store and a project for each test; and hosts, mended between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.fixtures import _cluster, _hosts, _with_accounting, _without_accounting
from tests.clusters.ssh import SshHosts

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
