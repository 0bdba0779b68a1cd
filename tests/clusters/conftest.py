"""The run's clusters, and a namespace of the Kubernetes one for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.fixtures import _cluster, _sagemaker, _tpu, _with_accounting, sagemaker, tpu, using
from tests.clusters.kubernetes import Kubernetes

__all__ = ["_cluster", "_sagemaker", "_tpu", "_with_accounting", "sagemaker", "tpu"]


@pytest.fixture
def cluster(_cluster: Kubernetes, request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    with using(_cluster, request) as cluster:
        yield cluster


@pytest.fixture
def place(cluster: Kubernetes) -> Iterator[str]:
    name = cluster.namespace()
    yield name
    cluster.start_api()
    cluster.remove_namespace(name, wait=False)
