"""Jobs on a cluster that a server of `accel serve` reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.serve.behind import run_through, served


def test_a_job_through_a_server(
    kubernetes: Kubernetes, namespace: str, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    with served(tmp_path, "kubernetes", {"cpu": True, "image": IMAGE}):
        run_through(project, grace_s=2.0)
