"""Jobs on hosts that a server of `accel serve` reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.ssh import SshHosts
from tests.serve.behind import run_through, served

from .conftest import ROOT, host_options


def test_a_job_through_a_server(
    ssh_hosts: SshHosts, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    with served(tmp_path, "ssh", {**host_options(ssh_hosts), "hosts": "node[1-4]"}):
        run_through(project, env={"PYTHONPATH": str(ROOT)})
