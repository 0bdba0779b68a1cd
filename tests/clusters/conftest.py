"""A Kubernetes cluster for the tests of one file, and a namespace for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.kubernetes import Kubernetes, claim, lacks
from tests.needs import missing


@pytest.fixture(scope="module")
def cluster() -> Iterator[Kubernetes]:
    absent = lacks()
    if absent:
        missing(*absent)
    with claim() as made:
        made.start(2)
        yield made


@pytest.fixture
def place(cluster: Kubernetes) -> Iterator[str]:
    cluster.start_api()
    name = cluster.namespace()
    yield name
    cluster.remove_namespace(name, wait=False)
