"""Hosts for the tests that need some: started once, ended at the end, mended between tests."""

from __future__ import annotations

from collections.abc import Iterator

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
