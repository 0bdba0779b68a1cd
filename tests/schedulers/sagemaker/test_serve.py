"""Jobs in an AWS account that a server of `accel serve` reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.sagemaker import SageMaker
from tests.serve.behind import run_through, served

from .conftest import target_options


def test_a_job_through_a_server(
    sagemaker: SageMaker, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    with served(tmp_path, "sagemaker", target_options(sagemaker)):
        run_through(project, grace_s=2.0, time_limit_s=600.0)
