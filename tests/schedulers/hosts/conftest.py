from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedulers.hosts.connection import Timeouts
from schedulers.hosts.transport import Pool
from tests.clusters.ssh import SshHosts
from tests.needs import missing


@pytest.fixture(autouse=True)
def _fabric(request: pytest.FixtureRequest) -> None:
    if {"pool", "impatient", "ssh_hosts"} & set(request.fixturenames):
        try:
            import fabric  # noqa: F401
        except ImportError:
            missing("fabric", "pip install 'accel-launch[ssh]'")


@pytest.fixture
def pool(ssh_hosts: SshHosts) -> Iterator[Pool]:
    """Connections that bear a busy machine."""
    with Pool(config=str(ssh_hosts.config), timeouts=Timeouts(connect_s=30)) as made:
        yield made


@pytest.fixture
def impatient(ssh_hosts: SshHosts) -> Iterator[Pool]:
    """Connections that are given up after 1.5 s of silence."""
    with Pool(config=str(ssh_hosts.config), timeouts=Timeouts(connect_s=10, alive_s=0.5)) as made:
        yield made
