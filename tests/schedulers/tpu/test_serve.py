"""Jobs on a TPU slice that a server of `accel serve` reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.tpu import Tpu
from tests.serve.behind import run_through, served

from .conftest import ROOT, make_slice, target_options


def test_a_job_through_a_server(
    tpu: Tpu, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_slice(tpu, "pod1")
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    with served(tmp_path, "tpu", target_options(tpu)):
        run_through(project, grace_s=2.0, env={"PYTHONPATH": str(ROOT)})
