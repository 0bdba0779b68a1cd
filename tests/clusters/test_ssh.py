"""The hosts of the tests are what they promise to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.netns import Slot, lacking
from tests.clusters.ssh import PROGRAMS, SshHosts, claim, main
from tests.marks import long
from tests.needs import missing
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hosts() -> SshHosts:
    absent = lacking(**PROGRAMS)
    if absent:
        missing(*absent)
    return claim()


def _ssh(hosts: SshHosts, name: str, command: str) -> str:
    argv = ["ssh", "-F", str(hosts.config), name, command]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hosts_share_the_files_of_this_computer_and_nothing_else(hosts: SshHosts) -> None:
    try:
        hosts.up(2)
        for name in hosts.names:
            assert _ssh(hosts, name, "hostname") == name
            _ssh(hosts, name, f"echo {name} | tee ~/mine > /dev/shm/mine")
            assert hosts.left(name) == ""
            _ssh(hosts, name, "ACCEL_JOB_ID=a-job sleep 1000 >/dev/null 2>&1 &")
            assert "sleep 1000" in hosts.left(name)
        for name in hosts.names:
            assert _ssh(hosts, name, "cat ~/mine /dev/shm/mine") == f"{name}\n{name}"
            assert _ssh(hosts, name, "pgrep -c sleep") == "2"  # its own, and the one that keeps it up
        python = f"PYTHONPATH={ROOT} {sys.executable} -c 'import schedulers; print(schedulers.__file__)'"
        assert _ssh(hosts, "node1", python) == str(ROOT / "schedulers/__init__.py")
        assert _ssh(hosts, "node1", f"getent ahostsv4 {hosts['node2'].name}").startswith(hosts["node2"].address)
    finally:
        hosts.down()


def test_two_clusters_do_not_meet_and_leave_nothing(hosts: SshHosts) -> None:
    other = claim()
    try:
        hosts.up(1)
        other.up(1)
        assert hosts["node1"].address != other["node1"].address
        other.down()
        assert _ssh(hosts, "node1", "hostname") == "node1"
    finally:
        hosts.down()
        other.down()
    for cluster in (hosts, other):
        tag = cluster.network.slot.tag
        assert not cluster.box.exists()
        assert not [name for name in os.listdir("/sys/class/net") if name.startswith((f"{tag}v", f"{tag}br"))]
        assert not [name for name in os.listdir("/run/netns") if name.startswith(f"{tag}-")]


def test_faults_can_be_mended(hosts: SshHosts) -> None:
    try:
        hosts.up(2)
        hosts["node1"].link(False)
        hosts["node2"].kill()
        hosts.heal()
        hosts.end_sshd("node1")
        hosts.heal()
        assert [_ssh(hosts, name, "hostname") for name in hosts.names] == hosts.names
    finally:
        hosts.down()


def test_a_host_comes_back_with_its_disk_and_another_boot_id(hosts: SshHosts) -> None:
    try:
        hosts.up(1)
        before = _ssh(hosts, "node1", "echo kept >~/mine; cat /proc/sys/kernel/random/boot_id")
        hosts.reboot("node1")
        assert _ssh(hosts, "node1", "cat ~/mine") == "kept"
        assert _ssh(hosts, "node1", "cat /proc/sys/kernel/random/boot_id") not in ("", before)
        hosts.small_disk("node1", f"{hosts.box}/home/root/small", 1)
        said = _ssh(hosts, "node1", "cd ~/small; head -c 2000000 /dev/zero >fill 2>&1 || stat -c %s fill")
        assert said == str(1 << 20)
    finally:
        hosts.down()


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    absent = lacking(**PROGRAMS)
    if absent:
        missing(*absent)  # which it says first
    assert main(["link", "node1", "sideways"]) != 0
    assert main(["nothing"]) == 2
    assert "python -m tests.clusters.ssh up 4" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, *long(0)])
def test_a_run_that_is_ended_by_a_signal_stops_its_clusters(tmp_path: Path, workers: int) -> None:
    absent = lacking(**PROGRAMS)
    if absent:
        missing(*absent)
    test = tmp_path / "test_it.py"
    test.write_text(
        "import pytest, signal\nfrom tests.clusters.fixtures import hosts\n"
        "cluster = pytest.fixture(lambda: (yield from hosts(1)))\n"
        "def test_it(cluster):\n"
        f"    open({str(tmp_path / 'up')!r}, 'w').write(str(cluster.network.slot.number))\n"
        "    signal.pause()\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", str(workers)]
    up = tmp_path / "up"
    with subprocess.Popen([*argv, f"--rootdir={tmp_path}", "-c/dev/null", str(test)], cwd=ROOT) as run:
        until(lambda: run.poll() is not None or (up.exists() and up.read_text()), "the hosts are up")
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    slot = Slot("as", int(up.read_text()))
    assert not slot.box.exists()
    assert list(Path("/run/netns").glob(f"{slot.tag}-*")) == []
