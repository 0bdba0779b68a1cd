"""A missing program skips a test, and fails it where it may not be missing."""

from __future__ import annotations

import pytest

from .needs import missing

SKIPPED, FAILED = pytest.skip.Exception, pytest.fail.Exception


@pytest.mark.parametrize(
    ("ci", "required", "what", "outcome"),
    [
        ("", "", "slurmctld", SKIPPED),
        ("1", "", "slurmctld", FAILED),
        ("1", "", "Kubernetes (etcd)", SKIPPED),  # no package has its programs
        ("1", "docker,kubernetes", "Kubernetes (etcd)", FAILED),
        ("", "kubernetes", "Kubernetes", FAILED),
    ],
)
def test_missing(
    monkeypatch: pytest.MonkeyPatch, ci: str, required: str, what: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("ACCEL_TEST_REQUIRE", required)
    with pytest.raises(outcome, match="is missing: install it"):
        missing(what, "install it")
