"""`accel targets check`: the examination of a target's hosts alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.cli import exits
from tests.clusters.ssh import SshHosts

from .conftest import ROOT


def test_a_target_is_checked_without_a_job(
    ssh_hosts: SshHosts, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["targets:", "  lab:", "    kind: ssh", "    hosts: 'node[1-3]'", f"    ssh_config: {ssh_hosts.config}"]
    lines += [f"    python: {sys.executable}", "    disk_gb: 0.001"]
    (tmp_path / "accel.yaml").write_text("\n".join(lines) + "\n")
    good = check("lab")
    assert good.returncode == exits.OK, good.stderr
    assert [line.split("\t")[0] for line in good.stdout.splitlines()] == ["node1", "node2", "node3"]
    ssh_hosts.new_host_key("node2")
    bad = check("lab", "--json")
    assert bad.returncode == exits.ERROR
    found = json.loads(bad.stdout)
    assert [row[-1] for row in found["table"]] == ["verdict", "ok", "fails", "ok"]
    assert [line for line in found["failures"] if line.startswith("node2: ITS HOST KEY HAS CHANGED")]
    assert not (ssh_hosts.home("node1") / ".accel").exists()


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accel", "targets", "check", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
