"""The examination of real hosts, before anything would start on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers.hosts.facts import HostRequirements
from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.preflight import Report, examine
from schedulers.hosts.remote_files import host_programs, program_loader
from schedulers.hosts.transport import Pool
from tests.clusters.ssh import SshHosts
from tests.nvml import fake_gpus

HOSTS = parse_hosts("node[1-4]")
ANY = HostRequirements(packages={}, disk_bytes=1)


def _said(report: Report) -> list[str]:
    return [str(finding) for finding in report.findings]


def test_hosts_that_can_run_a_job(pool: Pool, ssh_hosts: SshHosts) -> None:
    # As this very Python sees itself: what the hosts lack is what this computer lacks.
    packages = {"pytest": "pytest"}
    report = examine(pool, HOSTS, HostRequirements(packages=packages, disk_bytes=1), python=sys.executable)
    assert _said(report) == []
    assert report.ok
    assert report.usable == tuple(HOSTS)
    assert report.master == ssh_hosts["node1"].address
    assert report.port
    assert set(report.attempts) == {"node2", "node3", "node4"}
    first = report.rows[0].facts
    assert first is not None
    assert first.facts.name == "node1"
    assert first.facts.user == "root"
    assert first.facts.home == str(ssh_hosts.box / "home/root")
    assert first.facts.packages == {"pytest": pytest.__version__}
    assert ssh_hosts["node1"].address6 in {address.address for address in first.facts.addresses}
    assert abs(first.skew_s) < 1
    assert len(report.table()) == 5
    assert report.table()[1][0] == "node1"
    assert report.table()[1][-1] == "ok"


def test_every_host_that_cannot_take_part_is_said_at_once(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node2"].crash()
    ssh_hosts.home("node3").joinpath(".bashrc").write_text("exit 3\n")
    hosts = parse_hosts("node[1-4],node4:2222,[" + ssh_hosts["node1"].address6 + "],nowhere.invalid")
    report = examine(pool, hosts, ANY)
    said = _said(report)
    assert [row.verdict for row in report.rows] == ["ok", "fails", "fails", "ok", "fails", "fails", "fails"]
    assert any(line.startswith("node2: ") for line in said)
    assert "node3: its shell runs no command (status 3): it said nothing" in said
    assert "node4:2222: is the same machine as node4; leave one of the names out" in said
    assert any(line.endswith("is the same machine as node1; leave one of the names out") for line in said)
    said_of = "nowhere.invalid: no address for the name 'nowhere.invalid' (name or service not known)"
    assert f"{said_of}; from here, see: ssh nowhere.invalid" in said
    assert [str(host) for host in report.usable] == ["node1", "node4"]
    assert not report.ok
    assert report.table()[2] == ["node2", "-", "-", "-", "-", "-", "-", "fails"]


def test_a_python_that_is_not_there_and_packages_that_are_not(pool: Pool) -> None:
    report = examine(pool, HOSTS[:1], ANY, python="/opt/none/bin/python")
    assert _said(report) == [
        "node1: /opt/none/bin/python not found; create it, or name another (python: or venv: in accel.yaml)"
    ]
    wanted = HostRequirements(packages={"no-such-package": "no_such_module"}, disk_bytes=1 << 60, gpus=99)
    said = "\n".join(_said(examine(pool, HOSTS[:1], wanted)))
    assert "-m pip install no-such-package, or name another" in said
    assert "free at" in said
    assert "of 99 GPUs" in said


@pytest.fixture
def nics(ssh_hosts: SshHosts) -> Iterator[SshHosts]:
    """Interfaces that lead nowhere: one on node 0 alone, and the one that a container engine makes everywhere."""
    ssh_hosts["node1"].second_nic("eth1", "10.200.0.1/24")
    for machine in ssh_hosts.machines:
        machine.second_nic("docker0", "172.17.0.1/16")
    try:
        yield ssh_hosts
    finally:
        ssh_hosts["node1"].drop_nic("eth1")
        for machine in ssh_hosts.machines:
            machine.drop_nic("docker0")


def test_the_address_of_node_0_is_one_that_the_others_reached(nics: SshHosts, pool: Pool) -> None:
    report = examine(pool, HOSTS, ANY)
    assert report.ok, _said(report)
    assert report.master == nics["node1"].address
    tried = report.attempts["node2"]
    assert {"10.200.0.1", "172.17.0.1"} < set(tried)
    assert tried["10.200.0.1"] is not None
    assert tried["172.17.0.1"] is not None  # its own, of the same number
    assert tried[nics["node1"].address] is None


def test_an_interface_can_be_named_and_is_tried_all_the_same(nics: SshHosts, pool: Pool) -> None:
    report = examine(pool, HOSTS[:2], HostRequirements(packages={}, disk_bytes=1, interface="eth1"))
    assert report.master is None
    assert "node1: node2 does not reach it on port " in _said(report)[0]
    assert "10.200.0.1: " in _said(report)[0]
    report = examine(pool, HOSTS[:2], HostRequirements(packages={}, disk_bytes=1, interface="eth0"))
    assert report.master == nics["node1"].address
    report = examine(pool, HOSTS[:2], HostRequirements(packages={}, disk_bytes=1, interface="eht0"))
    assert (
        "node1: no interface 'eht0' with an address; did you mean 'eth0'? (it has docker0, eth0, eth1)"
        in _said(report)[0]
    )


def test_another_machine_that_answers_is_not_node_0(nics: SshHosts, pool: Pool) -> None:
    """Node 2 has node 0's second address too, and something listens there on the same port."""
    port = 29517
    code = (
        f"import socket; s = socket.create_server(('', {port})); print(flush=True)\nwhile True: s.accept()[0].close()"
    )
    with subprocess.Popen(nics["node2"].argv("python3", "-c", code), stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            wanted = HostRequirements(packages={}, disk_bytes=1, ports=(port,))
            report = examine(pool, HOSTS[:2], wanted)
            assert report.attempts["node2"]["172.17.0.1"] == "another machine answers there"
            assert (report.master, report.port) == (nics["node1"].address, port)
        finally:
            other.kill()


def test_a_port_that_is_taken_is_passed_over(pool: Pool, ssh_hosts: SshHosts) -> None:
    report = examine(pool, HOSTS[:2], HostRequirements(packages={}, disk_bytes=1, ports=(22, 29518)))
    assert report.port == 29518
    report = examine(pool, HOSTS[:2], HostRequirements(packages={}, disk_bytes=1, ports=(22,)))
    assert "node1: cannot listen on port 22: Address already in use; name other ports (ports: in accel.yaml)" in _said(
        report
    )


def test_a_first_host_that_is_cut_off_from_the_others_is_left_out(pool: Pool, ssh_hosts: SshHosts) -> None:
    for name in ("node2", "node3", "node4"):
        ssh_hosts[name].run("ip", "route", "add", "blackhole", ssh_hosts["node1"].address)
        ssh_hosts[name].run("ip", "route", "add", "blackhole", ssh_hosts["node1"].address6)
    try:
        report = examine(pool, HOSTS, ANY)
        two = examine(pool, HOSTS[:2], ANY)
    finally:
        for name in ("node2", "node3", "node4"):
            ssh_hosts[name].run("ip", "route", "del", "blackhole", ssh_hosts["node1"].address)
            ssh_hosts[name].run("ip", "route", "del", "blackhole", ssh_hosts["node1"].address6)
    assert "node1: no other host reaches it on port " in _said(report)[0]
    assert [str(host) for host in report.usable] == ["node2", "node3", "node4"]
    assert report.master == ssh_hosts["node2"].address
    # Of two, the other one is all that there is, and the spare of a job for one.
    assert [str(host) for host in two.usable] == ["node2"]
    assert (two.master, two.port is not None) == (ssh_hosts["node2"].address, True)
    assert "node1: node2 does not reach it on port " in _said(two)[0]


def _probe(request: dict[str, object], env: dict[str, str] | None = None) -> dict[str, object]:
    program = host_programs("listen", "program", "probe")
    done = subprocess.run(
        [sys.executable, "-c", program_loader(program)],
        input=program + json.dumps(request).encode() + b"\n",
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


REQUEST: dict[str, object] = {"do": "facts", "root": "~/x/y", "packages": {"accel-launch": "accel", "none": "none"}}


def test_gpus_are_counted_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-1", "GPU-2"])
    assert _probe(REQUEST)["gpus"] == {"count": 2, "how": "nvml", "problem": ""}


def test_gpus_are_counted_by_nvidia_smi_and_its_complaint_is_kept(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": ""}
    command.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: GPU-1)'\necho '  MIG'\necho 'GPU 1: X (UUID: GPU-2)'\n")
    command.chmod(0o755)
    assert _probe(REQUEST, env)["gpus"] == {"count": 2, "how": "nvidia-smi", "problem": ""}
    command.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    assert _probe(REQUEST, env)["gpus"] == {
        "count": 0,
        "how": "",
        "problem": "Failed to initialize NVML: Driver/library version mismatch",
    }


def test_the_probe_reads_no_module_of_the_directory_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    found = _probe(REQUEST)
    assert found["packages"] == {"accel-launch": _accel_version(), "none": None}
    assert isinstance(found["time"], float)
    assert abs(found["time"] - time.time()) < 60


def _accel_version() -> str:
    import accel

    return accel.__version__
