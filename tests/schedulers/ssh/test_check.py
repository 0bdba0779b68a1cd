"""`accel targets check`: the examination of a target's hosts alone; what is wrong with them, and lines that mend it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exit_status
from tests.clusters.ssh import SshHosts

from .conftest import ROOT

Check = Callable[..., subprocess.CompletedProcess[str]]
ELSE = "name another (python: or venv: in accel.yaml)"


@pytest.fixture
def check(ssh_hosts: SshHosts, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs `accel targets check lab` with these options of the target, and these words."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        lab = {"kind": "ssh", "hosts": "node[1-3]", "ssh_config": str(ssh_hosts.config), "disk_gb": 0.001}
        lab |= {"python": sys.executable} if "venv" not in options else {}
        (tmp_path / "accel.yaml").write_text(json.dumps({"targets": {"lab": lab | options}}))
        return subprocess.run(
            [sys.executable, "-m", "accel", "targets", "check", "lab", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip

    return run


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == exit_status.ERROR, done.stderr
    return [line.removeprefix("accel: fails: ") for line in done.stderr.splitlines()]


def test_a_target_is_checked_without_a_job(check: Check, ssh_hosts: SshHosts) -> None:
    good = check()
    assert good.returncode == exit_status.OK, good.stderr
    assert [line.split("\t")[0] for line in good.stdout.splitlines()] == ["node1", "node2", "node3"]
    ssh_hosts.new_host_key("node2")
    bad = check("--json")
    assert bad.returncode == exit_status.ERROR
    found = json.loads(bad.stdout)
    assert [row[-1] for row in found["table"]] == ["verdict", "ok", "fails", "ok"]
    assert [line for line in found["failures"] if line.startswith("node2: ITS HOST KEY HAS CHANGED")]
    assert not (ssh_hosts.home("node1") / ".accel").exists()


def test_machines_on_the_line(check: Check) -> None:
    found = check("--hosts", "node2,node3", "--gpus", "8")
    assert failures(found) == [
        f"{node}: has 0 of 8 GPUs; request fewer (--gpus), or leave it out" for node in ("node2", "node3")
    ]


@pytest.mark.parametrize("wrong", ["unknown", "changed"])
def test_the_line_that_accepts_a_key_is_one_that_does(check: Check, ssh_hosts: SshHosts, wrong: str) -> None:
    if wrong == "unknown":
        lines = ssh_hosts.known_hosts.read_text().splitlines(keepends=True)
        ssh_hosts.known_hosts.write_text("".join(line for line in lines if not line.startswith("node2,")))
    else:
        ssh_hosts.new_host_key("node2")
    (line,) = failures(check())
    said = {"unknown": "its host key is not known: ", "changed": "ITS HOST KEY HAS CHANGED: "}[wrong]
    assert line.startswith(f"node2: {said}")
    assert " SHA256:" in line
    before = {"unknown": "; if that is right: ", "changed": "If the host was installed anew: "}[wrong]
    subprocess.run(["sh", "-ec", line.partition(before)[2]], check=True, capture_output=True)
    assert check().returncode == exit_status.OK


def test_hosts_with_other_environments(check: Check, ssh_hosts: SshHosts) -> None:
    environment(ssh_hosts, "node1", torch="2.13.0", accel_launch="0.4.0")
    environment(ssh_hosts, "node2", torch="2.12.1", accel_launch="0.4.0")
    environment(ssh_hosts, "node3", torch="2.13.0")
    python = "~/venv/bin/python"
    assert failures(check(venv="~/venv")) == [
        f"node3: no accel-launch for {python}; run there: {python} -m pip install accel-launch==0.4.0, or {ELSE}",
        f"node2: has torch 2.12.1, most hosts 2.13.0; run there: {python} -m pip install torch==2.13.0",
    ]
    found = failures(check(venv="~/no-venv"))
    assert found == [f"node{number}: ~/no-venv/bin/python not found; create it, or {ELSE}" for number in (1, 2, 3)]


def environment(hosts: SshHosts, node: str, **packages: str) -> Path:
    """A virtual environment in the home on that host, that says it has these packages."""
    top = hosts.home(node) / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(top)], check=True)
    (site,) = top.glob("lib/python*/site-packages")
    for name, version in packages.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info/METADATA").write_text(text)
    return site


def test_a_clock_that_is_wrong(check: Check, ssh_hosts: SshHosts) -> None:
    for node in ("node1", "node2", "node3"):
        site = environment(ssh_hosts, node, torch="2.13.0", accel_launch="0.4.0")
    (site / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 3600\n")
    (line,) = failures(check(venv="~/venv"))
    assert line.startswith("node3: its clock is 36")
    assert line.endswith(" s ahead; start a time service there: timedatectl set-ntp true (or chronyd)")


def test_hosts_that_cannot_be_asked(check: Check, ssh_hosts: SshHosts) -> None:
    ssh_hosts.end_sshd("node2")
    ssh_hosts.home("node3").joinpath(".bashrc").write_text("exit 3\n")
    refused, silent = failures(check())
    assert refused == f"node2: {ssh_hosts['node2'].address}:22: connection refused; from here, see: ssh node2"
    assert silent.startswith("node3: its shell runs no command (status 3)")
    assert failures(check(hosts="root@nodee1:2222")) == [
        "root@nodee1:2222: no address for the name 'nodee1' (name or service not known); "
        "from here, see: ssh -p 2222 root@nodee1"
    ]
    (line,) = failures(check(hosts="node1", user="stranger"))
    assert line.startswith("stranger@node1: does not let stranger in; tried ")
    assert line.endswith("; check the user, or ssh-copy-id stranger@node1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk_gb": 1_000_000}, "are needed; free space there, or lower disk_gb in accel.yaml"),
        ({"root": "/root/x", "user": "worker", "python": "/usr/bin/python3"}, "worker may not write to /"),
        (
            {"interface": "ib"},
            "no interface 'ib' with an address (it has eth0); name another (interface: in accel.yaml, or --option ",
        ),
    ],
)
def test_what_hosts_do_not_have(check: Check, options: dict[str, Any], said: str) -> None:
    assert any(said in line for line in failures(check(hosts="node1,node2", **options)))


def test_a_port_that_is_closed_between_hosts(check: Check, ssh_hosts: SshHosts) -> None:
    first = ssh_hosts["node1"]
    for address in (first.address, first.address6):
        ssh_hosts["node2"].run("ip", "route", "add", "unreachable", address)
    try:
        (line,) = failures(check(hosts="node[1-3]"))
    finally:
        for address in (first.address, first.address6):
            ssh_hosts["node2"].run("ip", "route", "del", "unreachable", address)
    assert line.startswith("node2: cannot reach node1 on port ")
    assert "open the target's ports in the firewall (ports: in accel.yaml), or name the network to use" in line
