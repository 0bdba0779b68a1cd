"""Both versions of Helm, and a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

# The fixtures of a cluster and of a store.
from ..clusters.fixtures import _cluster  # noqa: F401
from ..schedulers.conftest import home  # noqa: F401
from ..schedulers.kubernetes.conftest import kubernetes, namespace  # noqa: F401
from . import helms

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> helms.Helm:
    """A version of Helm; a test that takes it runs with both."""
    if request.param == "helm3":
        return helms.Helm3(helms.helm3())
    helms.check_helm4()
    return helms.Helm4()


@pytest.fixture(scope="session")
def helm3() -> helms.Helm3:
    return helms.Helm3(helms.helm3())
