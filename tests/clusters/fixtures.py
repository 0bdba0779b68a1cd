"""Clusters for the tests that need one: one of each kind in a process, ended with the process's session.

A folder whose tests need one imports its fixture into the folder's conftest.py. `tests/shares.py` gives all tests of a
kind to one worker, so that a run starts one cluster of each kind; that of Kubernetes is shared by all workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.needs import missing

from . import docker as docker_daemon
from . import existing
from .docker import Docker
from .kubernetes import Kubernetes, joined
from .kubernetes import claim as claim_kubernetes
from .kubernetes import lacks as lacks_kubernetes
from .netns import lacking
from .sagemaker import SageMaker
from .sagemaker import lacks as lacks_sagemaker
from .sharing import Shared
from .slurm import ACCOUNTING_PROGRAMS, LOGIN_PROGRAMS, Slurm
from .slurm import PROGRAMS as SLURM_PROGRAMS
from .slurm import claim as claim_slurm
from .ssh import PROGRAMS as SSH_PROGRAMS
from .ssh import SshHosts
from .ssh import claim as claim_hosts
from .tpu import Tpu
from .tpu import lacks as lacks_tpu

SSH_HOSTS, SLURM_NODES, KUBERNETES_NODES, TPU_HOSTS = 4, 4, 2, 4
Cluster = TypeVar("Cluster", SshHosts, Slurm, Kubernetes, SageMaker, Docker, Tpu)
_running: dict[str, SshHosts | Slurm | Kubernetes | SageMaker | Docker | Tpu] = {}


def _shared(config: pytest.Config, kind: str, start: Callable[[], Iterator[Cluster]]) -> Cluster:
    """The cluster of this kind. A fixture that two folders import is two fixtures, and still one cluster."""
    if kind not in _running:
        cluster = start()
        _running[kind] = next(cluster)

        def end() -> None:
            del _running[kind]
            next(cluster, None)

        config.add_cleanup(end)
    return _running[kind]  # type: ignore[return-value]  # what `start` has made


@pytest.fixture(scope="session")
def _hosts(pytestconfig: pytest.Config) -> SshHosts:
    return _shared(pytestconfig, "ssh", lambda: hosts(SSH_HOSTS))


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
def _without_accounting(pytestconfig: pytest.Config) -> Slurm:
    return _shared(pytestconfig, "slurm", lambda: _slurm(accounting=False, gpus=0))


@pytest.fixture(scope="session")
def _with_accounting(pytestconfig: pytest.Config) -> Slurm:
    return _shared(pytestconfig, "slurm with accounting", lambda: _slurm(accounting=True, gpus=2))


def _slurm(*, accounting: bool, gpus: int) -> Iterator[Slurm]:
    absent = lacking(**SLURM_PROGRAMS, **LOGIN_PROGRAMS, **(ACCOUNTING_PROGRAMS if accounting else {}))
    if absent:
        missing(*absent)
    with claim_slurm() as cluster:
        cluster.start(SLURM_NODES, accounting=accounting, gpus=gpus, login=True)
        yield cluster


@pytest.fixture(scope="session")
def _sagemaker(pytestconfig: pytest.Config) -> SageMaker:
    return _shared(pytestconfig, "sagemaker", _endpoint)


def _endpoint() -> Iterator[SageMaker]:
    absent = lacks_sagemaker()
    if absent:
        missing(*absent)
    endpoint = SageMaker()
    try:
        yield endpoint
    finally:
        endpoint.end()


@pytest.fixture
def sagemaker(_sagemaker: SageMaker, monkeypatch: pytest.MonkeyPatch) -> SageMaker:
    """A new AWS account, which this process's environment leads to."""
    _sagemaker.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in _sagemaker.env.items():
        monkeypatch.setenv(name, value)
    return _sagemaker


@pytest.fixture(scope="session")
def _tpu(pytestconfig: pytest.Config) -> Tpu:
    return _shared(pytestconfig, "tpu", _tpu_api)


def _tpu_api() -> Iterator[Tpu]:
    absent = lacks_tpu()
    if absent:
        missing(*absent)
    api = Tpu(TPU_HOSTS)
    try:
        yield api
    finally:
        api.end()


@pytest.fixture
def tpu(_tpu: Tpu, monkeypatch: pytest.MonkeyPatch) -> Tpu:
    """A new Google Cloud project, which this process's environment leads to."""
    _tpu.reset()
    for name in [name for name in os.environ if name.startswith(("CLOUDSDK_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in _tpu.env.items():
        monkeypatch.setenv(name, value)
    return _tpu


@pytest.fixture(scope="session")
def docker(pytestconfig: pytest.Config) -> Docker:
    """A Docker daemon, without containers and with the image `host:1`."""
    return _shared(pytestconfig, "docker", _daemon)


def _daemon() -> Iterator[Docker]:
    absent = docker_daemon.lacks()
    if absent:
        missing(*absent)
    made = docker_daemon.claim()
    try:
        made.start()
        yield made
    finally:
        made.stop()
        made.slot.release()


@pytest.fixture(scope="session")
def _cluster(pytestconfig: pytest.Config) -> Kubernetes:
    return _shared(pytestconfig, "kubernetes", lambda: kubernetes(KUBERNETES_NODES))


def kubernetes(nodes: int) -> Iterator[Kubernetes]:
    """For a fixture: a cluster of so many nodes, or the one that somebody has, until it is done with."""
    if (theirs := existing.given()) is not None:
        with existing.Existing(theirs) as cluster:
            yield cluster
        return
    absent = lacks_kubernetes()
    if absent:
        missing(*absent)

    @contextlib.contextmanager
    def start() -> Iterator[tuple[Kubernetes, int]]:
        with claim_kubernetes() as cluster:
            cluster.start(nodes)
            yield cluster, cluster.slot.number

    with Shared("kubernetes").cluster(start, lambda number: joined(number, nodes)) as cluster:
        yield cluster


@contextlib.contextmanager
def using(cluster: Kubernetes, request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """The cluster, with its API server up, for one test. Tests marked `alone`, which break parts of it, have it to
    themselves."""
    cluster.alone = request.node.get_closest_marker("alone") is not None
    with Shared("kubernetes").using(alone=cluster.alone):
        cluster.start_api()
        cluster.check()
        try:
            yield cluster
        finally:
            cluster.start_api()
