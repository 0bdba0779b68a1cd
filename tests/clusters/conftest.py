"""A Kubernetes cluster for the tests of one file, and a namespace for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.fixtures import kubernetes
from tests.clusters.kubernetes import Kubernetes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Kubernetes]:
    yield from kubernetes(2)


@pytest.fixture
def place(cluster: Kubernetes) -> Iterator[str]:
    cluster.start_api()
    name = cluster.namespace()
    yield name
    cluster.remove_namespace(name, wait=False)
