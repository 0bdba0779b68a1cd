"""Findings out of facts: tables of what may be wrong."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.convert import convert
from schedulers.hosts.addresses import candidates, choose
from schedulers.hosts.checks import run_checks
from schedulers.hosts.facts import GB, Address, Devices, Facts, Gpus, HostRequirements, TimedFacts

FACTS = Facts(
    name="gpu1",
    machine="m1",
    user="bob",
    home="/home/bob",
    python="3.11.7",
    executable="/usr/bin/python3",
    packages={"accel-launch": "0.3.0", "torch": "2.13.0+cu126"},
    disk="/home/bob",
    disk_free=100 * GB,
    disk_writable=True,
    shm_free=10 * GB,
    processes=-1,
    files=65536,
    gpus=Gpus(count=8, how="nvml"),
    addresses=(),
    time=1000.0,
)


def _seen(machine: str, **other: object) -> TimedFacts:
    facts = dataclasses.replace(FACTS, machine=machine, **other)  # type: ignore[arg-type]
    return TimedFacts(facts=facts, requested_at=999.9, replied_at=1000.1)


def _findings(wanted: HostRequirements, **other: object) -> list[str]:
    """Of three hosts, of which the last one is different."""
    hosts = {"a": _seen("m1"), "b": _seen("m2"), "c": _seen(str(other.pop("machine", "m3")), **other)}
    return [f"{finding.severity} {finding}" for finding in run_checks(hosts, wanted)]


def test_nothing_is_wrong_with_hosts_that_are_alike() -> None:
    assert _findings(HostRequirements(gpus=8)) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"machine": "m1"}, "fails c: is the same machine as a; leave one of the names out"),
        (
            {"python": "3.8.10"},
            "fails c: /usr/bin/python3 is Python 3.8.10; 3.10 is required; "
            "name another (python: or venv: in accel.yaml)",
        ),
        (
            {"python": "3.12.1"},
            "warns c: has Python 3.12.1, most hosts 3.11; "
            "use the same one, or name another (python: or venv: in accel.yaml)",
        ),
        (
            {"packages": {"accel-launch": "0.3.0", "torch": None}},
            "fails c: no torch for /usr/bin/python3; run there: /usr/bin/python3 -m pip install torch==2.13.0, "
            "or name another (python: or venv: in accel.yaml)",
        ),
        (
            {"packages": {"accel-launch": "0.3.0", "torch": "2.13.1+cu126"}},
            "warns c: has torch 2.13.1+cu126, most hosts 2.13.0+cu126; "
            "run there: /usr/bin/python3 -m pip install torch==2.13.0",
        ),
        (
            {"packages": {"accel-launch": "0.3.0", "torch": "2.12.0"}},
            "fails c: has torch 2.12.0, most hosts 2.13.0+cu126; "
            "run there: /usr/bin/python3 -m pip install torch==2.13.0",
        ),
        (
            {"disk_free": 3_000_000},
            "fails c: 3 MB free at /home/bob, 1.0 GB are needed; free space there, or lower disk_gb in accel.yaml",
        ),
        (
            {"disk_writable": False},
            "fails c: bob may not write to /home/bob; name another directory (root: in accel.yaml)",
        ),
        (
            {"shm_free": 64_000_000},
            "warns c: 64 MB free at /dev/shm, which data loaders use; "
            "enlarge it there: mount -o remount,size=50% /dev/shm (a container: --shm-size)",
        ),
        (
            {"time": 1030.0},
            "warns c: its clock is 30 s ahead; start a time service there: timedatectl set-ntp true (or chronyd)",
        ),
        (
            {"time": 0.0},
            "fails c: its clock is 1000 s behind; start a time service there: timedatectl set-ntp true (or chronyd)",
        ),
        (
            {"gpus": Gpus(count=4, how="nvidia-smi")},
            "warns c: has 4 GPUs, most hosts 8; set how many to use: --gpus",
        ),
        (
            {"gpus": Gpus(count=8, how="driver", problem="NVML does not start (error 18)")},
            "fails c: its GPUs do not work: NVML does not start (error 18); run there: nvidia-smi",
        ),
        (
            {"devices": Devices(problem="failed (signal 11): it printed nothing")},
            "warns c: the probe for its devices failed (signal 11): it printed nothing; "
            "run there: /usr/bin/python3 -m accel.launch.devices",
        ),
        ({"files": 1024}, "warns c: bob may open 1024 files; raise nofile there, in /etc/security/limits.conf"),
        ({"processes": 100}, "warns c: bob may have 100 processes; raise nproc there, in /etc/security/limits.conf"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_remedy(other: dict[str, object], expected: str) -> None:
    assert _findings(HostRequirements(), **other) == [expected]


@pytest.mark.parametrize("cpus", [0, -1, 20_000_000])
def test_a_number_of_processors_that_no_machine_has_is_refused(cpus: int) -> None:
    document = dataclasses.asdict(FACTS)
    assert convert(document, Facts) == FACTS
    document["devices"]["cpus"] = cpus
    with pytest.raises(ValueError, match=r"\$\.devices\.cpus"):
        convert(document, Facts)


def test_gpus_are_as_asked_or_the_host_fails() -> None:
    line = "fails c: has 4 of 8 GPUs (nvml); request fewer (--gpus), or leave it out"
    assert _findings(HostRequirements(gpus=8), gpus=Gpus(count=4, how="nvml")) == [line]


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_way_however_long_is_never_taken_for_a_wrong_clock(skew: float, there: float, back: float) -> None:
    seen = TimedFacts(facts=dataclasses.replace(FACTS, time=there + skew), requested_at=0.0, replied_at=there + back)
    assert abs(seen.skew_s) <= abs(skew) + 1e-6
    assert abs(skew) <= abs(seen.skew_s) + max(there, back) + 1e-6
    assert seen.skew_s * skew >= 0


ETH = Address(interface="eth0", address="10.0.0.1", speed=1000)
SLOW = Address(interface="eth1", address="192.168.0.1", speed=100)
FAST = Address(interface="ib0", address="10.1.0.1", speed=200_000)
SIX = Address(interface="eth0", address="fd00::1", speed=1000)
DOCKER = Address(interface="docker0", address="172.17.0.1", speed=0, virtual=True)
WIRE = Address(interface="eno1", address="10.2.0.1", speed=0)


@pytest.mark.parametrize(
    ("addresses", "hostname", "interface", "expected"),
    [
        ((DOCKER, SLOW, ETH, FAST, SIX), "10.0.0.1", None, "10.1.0.1 10.0.0.1 fd00::1 192.168.0.1 172.17.0.1"),
        ((WIRE, ETH), "bastion.example", None, "10.0.0.1 10.2.0.1 bastion.example"),
        ((SIX, ETH), "fd00::1", None, "fd00::1 10.0.0.1"),
        ((ETH, FAST), "x", "eth0", "10.0.0.1"),
        ((ETH, FAST), "x", "ib", "10.1.0.1"),
        ((ETH, SLOW), "x", "eth", "10.0.0.1 192.168.0.1"),
        ((), "127.0.0.1", None, None),
        ((ETH,), "x", "ib0", None),
    ],
)
def test_the_best_address_is_tried_first(
    addresses: tuple[Address, ...], hostname: str, interface: str | None, expected: str | None
) -> None:
    found, problem = candidates(addresses, hostname, interface)
    assert (found, problem is None) == ((expected or "").split(), expected is not None)


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    _, problem = candidates((ETH, FAST), "x", "eht0")
    assert problem is not None
    assert problem[0] == "no interface 'eht0' with an address; did you mean 'eth0'? (it has eth0, ib0)"


def test_the_first_address_that_all_reached_is_chosen() -> None:
    address, findings = choose(
        "a", ["1", "2", "3"], {"b": {"1": "no", "2": None, "3": None}, "c": dict.fromkeys("123")}, 7
    )
    assert (address, findings) == ("2", [])


def test_a_host_that_reached_none_is_named() -> None:
    matrix: dict[str, dict[str, str | None]] = {"b": dict.fromkeys("12"), "c": {"1": "refused", "2": "no answer"}}
    address, findings = choose("a", ["1", "2"], matrix, 7)
    assert address == "1"
    assert [str(finding) for finding in findings] == [
        "c: cannot reach a on port 7 (1: refused, 2: no answer); "
        "open the target's ports in the firewall (ports: in accel.yaml), or name the network to use "
        "(interface: in accel.yaml, or --option interface=NAME); "
        "gloo and NCCL take ports of net.ipv4.ip_local_port_range as well"
    ]


def test_a_first_host_that_none_reached_is_the_one_at_fault() -> None:
    address, findings = choose("a", ["1"], {"b": {"1": "refused"}, "c": {"1": "refused"}}, 7)
    assert address is None
    assert [finding.host for finding in findings] == ["a"]
    assert "no other host reaches it on port 7 (from b: 1: refused)" in str(findings[0])


def test_a_single_host_needs_nobody() -> None:
    assert choose("a", ["1", "2"], {}, 7)[0] == "1"
