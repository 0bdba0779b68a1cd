"""Clusters for the tests that need one: each is started once in a process, and ended at its end.

They stand here, and are imported by tests/conftest.py alone, because a fixture that is imported twice is two fixtures:
two clusters.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.needs import missing

from .kubernetes import Kubernetes
from .kubernetes import claim as claim_kubernetes
from .kubernetes import lacks as lacks_kubernetes
from .netns import lacking
from .slurm import ACCOUNTING_PROGRAMS, LOGIN_PROGRAMS, Slurm
from .slurm import PROGRAMS as SLURM_PROGRAMS
from .slurm import claim as claim_slurm
from .ssh import PROGRAMS as SSH_PROGRAMS
from .ssh import SshHosts
from .ssh import claim as claim_hosts

SSH_HOSTS, SLURM_NODES, KUBERNETES_NODES = 4, 4, 2


@pytest.fixture(scope="session")
def _hosts() -> Iterator[SshHosts]:
    yield from hosts(SSH_HOSTS)


def hosts(count: int) -> Iterator[SshHosts]:
    """For a fixture: so many hosts, until it is done with."""
    absent = lacking(**SSH_PROGRAMS)
    if absent:
        missing(*absent)
    made = claim_hosts()
    try:
        made.up(count)
        yield made
    finally:
        made.down()


@pytest.fixture(scope="session")
def _without_accounting() -> Iterator[Slurm]:
    yield from _slurm(accounting=False, gpus=0)


@pytest.fixture(scope="session")
def _with_accounting() -> Iterator[Slurm]:
    yield from _slurm(accounting=True, gpus=2)


def _slurm(*, accounting: bool, gpus: int) -> Iterator[Slurm]:
    absent = lacking(**SLURM_PROGRAMS, **LOGIN_PROGRAMS, **(ACCOUNTING_PROGRAMS if accounting else {}))
    if absent:
        missing(*absent)
    with claim_slurm() as cluster:
        cluster.start(SLURM_NODES, accounting=accounting, gpus=gpus, login=True)
        yield cluster


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Kubernetes]:
    yield from kubernetes(KUBERNETES_NODES)


def kubernetes(nodes: int) -> Iterator[Kubernetes]:
    """For a fixture: a cluster of so many nodes, until it is done with."""
    absent = lacks_kubernetes()
    if absent:
        missing(*absent)
    with claim_kubernetes() as cluster:
        cluster.start(nodes)
        yield cluster
