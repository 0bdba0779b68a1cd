"""A store and a project for each test; and hosts, started once, ended at the end, mended between tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.netns import lacking
from tests.clusters.ssh import PROGRAMS, SshHosts, claim
from tests.needs import missing

COUNT = 4


@pytest.fixture(scope="session")
def _hosts() -> Iterator[SshHosts]:
    absent = lacking(**PROGRAMS)
    if absent:
        missing(*absent)
    hosts = claim()
    try:
        hosts.up(COUNT)
        yield hosts
    finally:
        hosts.down()


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
