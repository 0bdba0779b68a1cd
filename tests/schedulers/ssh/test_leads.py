"""A host that takes the lead is called on an address that the others have reached, whatever its interfaces are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schedulers import Reason, State
from schedulers.hosts.facts import HostRequirements
from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.preflight import examine
from schedulers.hosts.transport import Pool
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import Submit, printed

DEAD = "10.200.0.2"


@pytest.fixture
def odd(ssh_hosts: SshHosts) -> Iterator[SshHosts]:
    """On node2 the interface that is called as the others' good one leads nowhere, and the good one is called ens5."""
    rename(ssh_hosts, "eth0", "ens5")
    ssh_hosts["node2"].second_nic("eth0", f"{DEAD}/24")
    yield ssh_hosts
    ssh_hosts["node2"].drop_nic("eth0")
    rename(ssh_hosts, "ens5", "eth0")


def rename(hosts: SshHosts, old: str, new: str) -> None:
    machine = hosts["node2"]
    script = f"ip link set {old} down; ip link set {old} name {new}; ip link set {new} up"
    machine.run("sh", "-ec", f"{script}; ip addr replace {machine.address6}/64 dev {new} nodad")


def test_the_next_hosts_addresses_are_tried_too(odd: SshHosts) -> None:
    with Pool(config=str(odd.config)) as pool:
        hosts = parse_hosts("node[1-4]")
        report = examine(pool, hosts, HostRequirements(packages={}, disk_bytes=1))
        assert report.ok, report.findings
        assert report.leads == {host: odd[host.name].address for host in hosts}
        report = examine(pool, hosts, HostRequirements(packages={}, disk_bytes=1, interface="eth0"))
        assert report.usable == tuple(hosts)
        (warning,) = [str(finding) for finding in report.findings]
        assert warning.startswith("node2: node1 and 2 more do not reach it on port ")
        assert f"(from node1: {DEAD}: " in warning
        assert "so it cannot lead when the first host is lost; open the target's ports" in warning
        assert [row.verdict for row in report.rows] == ["ok", "warns", "ok", "ok"]
        report = examine(pool, hosts, HostRequirements(packages={}, disk_bytes=1, interface="ens"))
        assert report.leads == {hosts[1]: odd["node2"].address}
        remedy = "name another (interface: in accel.yaml, or --option interface=NAME)"
        said = f"no interface 'ens' with an address (it has eth0); {remedy}"
        assert [str(finding) for finding in report.findings] == [f"node{number}: {said}" for number in (1, 3, 4)]
        assert [row.verdict for row in report.rows] == ["fails", "ok", "warns", "warns"]


def test_the_job_goes_on_under_the_next_host(submit: Submit, odd: SshHosts) -> None:
    job = submit(
        'echo "on $(hostname)"; [ "$(hostname)" = node1 ] && sleep 300; [ "$ACCEL_ATTEMPT" = 1 ] || sleep 300',
        hosts="node[1-3]",
        max_restarts=1,
        options={"spares": 1},
    )
    until(lambda: printed(job) == "on node1\non node2\n", "both ranks run")
    odd["node1"].kill()
    status = job.wait(90)
    assert (status.state, status.reason, status.attempt) == (State.SUCCEEDED, Reason.NONE, 1), status
    assert [line.text for line in job.logs() if line.attempt == 1 and line.rank is not None] == [
        "on node2\n",
        "on node3\n",
    ]
