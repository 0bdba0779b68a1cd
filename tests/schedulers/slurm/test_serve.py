"""Jobs on a cluster whose commands a server of `accel serve` calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.slurm import Slurm
from tests.serve.behind import run_through, served


def test_a_job_through_a_server(
    slurm: Slurm, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    with served(tmp_path, "slurm", {"cpu": True}):
        run_through(project, cpus=1)
