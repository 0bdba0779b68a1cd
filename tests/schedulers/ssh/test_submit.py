"""What goes to hosts: secrets through memory only, nothing half on a full disk, large code from host to host."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedulers import JobSpec, Reason, State, SubmitError
from schedulers.hosts import fanout, remote_files
from schedulers.hosts.bundle import PROGRAM, program
from schedulers.hosts.errors import RemoteError
from schedulers.hosts.fanout import FanOutResult, fan_out
from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.remote_files import Blob, Files, host_programs, program_loader
from schedulers.hosts.transport import Pool
from schedulers.store.snapshot import pack
from schedulers.store.store import Store
from schedulers.sweeps import submit_sweep
from tests.clusters.netns import answers
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, job_files, printed

SECRET = "hush-hush-0123456789"
MARK = "ACCEL_JOB_ID="

# Submits, and dies at the step that it is told: as it begins a conversation with a host, or when it has said something.
CLIENT = """
import os, signal, sys, threading
import schedulers
from schedulers.hosts.session import Session

left = int(sys.argv[3])
lock = threading.Lock()
write = Session.write

def count(self, data):
    global left
    with lock:
        left -= 1
        if left == 0:
            write(self, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    write(self, data)

Session.write = count
schedulers.submit("./job.sh", target="ssh", entry="command", cwd=sys.argv[1], **eval(sys.argv[2]))
"""


@pytest.fixture
def pool(ssh_hosts: SshHosts) -> Iterator[Pool]:
    with Pool(config=str(ssh_hosts.config)) as made:
        yield made


def told(hosts: SshHosts, node: str) -> list[str]:
    """Where the secret can be read on a host, other than in the environment of the job's own processes."""
    found = [str(path) for path in hosts.home(node).parent.rglob("*") if _holds(path)]
    script = f"""
    for p in /proc/[0-9]*; do
      grep -aq {SECRET[:9]}'{SECRET[9:]}' $p/cmdline 2>/dev/null && echo $p/cmdline
      grep -aq {MARK} $p/environ 2>/dev/null || {{
        grep -aq {SECRET[:9]}'{SECRET[9:]}' $p/environ 2>/dev/null && echo $p/environ
      }}
    done; grep -rl {SECRET[:9]}'{SECRET[9:]}' /dev/shm; :"""
    script = script.replace(f"{SECRET[:9]}'{SECRET[9:]}'", f"{SECRET[:9]}[{SECRET[9]}]{SECRET[10:]}")
    return found + hosts[node].run("env", "-u", "TOKEN_HERE", "sh", "-c", script).split()


def _holds(path: Path) -> bool:
    try:
        return path.is_file() and SECRET.encode() in path.read_bytes()
    except OSError:
        return False


def test_a_client_that_is_killed_at_any_step_leaves_no_secret(
    ssh_hosts: SshHosts, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_HERE", SECRET)
    (project / "job.sh").write_text("#!/bin/sh\ntest ${#TOKEN} = 20 && echo has it\n")
    (project / "job.sh").chmod(0o755)
    options = host_options(ssh_hosts) | {"hosts": "node[1-2]", "start_timeout_s": 4}
    given = {
        "nodes": 2, "procs_per_node": 1, "options": options, "env": {"PYTHONPATH": str(ROOT)},
        "secrets": {"TOKEN": "env:TOKEN_HERE"},
    }  # fmt: skip
    over = threading.Event()
    hits: set[str] = set()

    def look() -> None:
        while not over.is_set():
            for node in ("node1", "node2"):
                with contextlib.suppress(OSError):  # what goes while it is looked at
                    hits.update(str(path) for path in ssh_hosts.home(node).rglob("*") if _holds(path))

    looker = threading.Thread(target=look)
    looker.start()
    deaths = 0
    try:
        for step in range(1, 200, 4):
            client = subprocess.run(
                [sys.executable, "-c", CLIENT, str(project), repr(given), str(step)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert client.returncode in (0, -signal.SIGKILL)
            for node in ("node1", "node2"):
                assert told(ssh_hosts, node) == [], step
            if client.returncode == 0:
                break
            deaths += 1
    finally:
        over.set()
        looker.join()
        for machine in ssh_hosts.machines:
            machine.kill()
    assert deaths > 5
    assert hits == set()


@pytest.mark.parametrize("said", [b"", b'{"TOKEN": "hush', b"{}"])
def test_a_supervisor_starts_only_with_all_its_secrets(pool: Pool, ssh_hosts: SshHosts, said: bytes) -> None:
    me = {"name": "node1", "address": ssh_hosts["node1"].address, "control_port": 23456}
    settings = {"schema": 1, "job_id": "t-1", "node": 0, "nodes": [me], "spares": [], "secrets": ["TOKEN"]}
    files = {"settings.json": json.dumps(settings).encode(), PROGRAM: program()}
    Files(pool.remote("node1")).put({f"jobs/t-1/{name}": data for name, data in files.items()})
    with pytest.raises(RemoteError, match=r"node1: .*the values of secrets are missing: TOKEN$"):
        pool.remote("node1").run(
            ["sh", "-c", "exec python3 -I ~/.accel/jobs/t-1/supervisor.pyz ~/.accel/jobs/t-1 0"], stdin=said
        )
    assert not (job_files(ssh_hosts, "node1", "t-1") / "state.json").exists()


def test_every_attempt_has_the_secrets(submit: Submit, ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_HERE", SECRET)
    script = 'test ${#TOKEN} = 20 && echo "attempt $ACCEL_ATTEMPT has it"; [ "$ACCEL_ATTEMPT" = 1 ]'
    job = submit(script, secrets={"TOKEN": "env:TOKEN_HERE"}, max_restarts=1)
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job, 0) == "attempt 0 has it\nattempt 1 has it\n"
    assert [told(ssh_hosts, node) for node in ("node1", "node2")] == [[], []]


@pytest.fixture
def tarball(tmp_path: Path) -> Blob:
    """A tar file of a megabyte and more."""
    source = tmp_path / "code"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(3_000_000))
    return Blob.of(pack(source, tmp_path / "packed").path)


Given = dict[str, Any]


@pytest.fixture
def way(ssh_hosts: SshHosts) -> Given:
    """How the tests' hosts reach each other."""
    hosts = parse_hosts(",".join(ssh_hosts.names))
    ports = list(range(24000, 24010))
    return {
        "addresses": {host: ssh_hosts[host.name].address for host in hosts},
        "root": "~/.accel",
        "python": "python3",
        "ports": dict.fromkeys(hosts, ports),
    }


def blobs(hosts: SshHosts, node: str) -> list[str]:
    try:
        return sorted(path.name for path in (hosts.home(node) / ".accel/blobs").iterdir())
    except FileNotFoundError:
        return []


def processes(hosts: SshHosts, node: str) -> str:
    """What still gets or passes on a content, or listens for somebody who wants it."""
    return hosts[node].run("sh", "-c", "pgrep -f 'stdi[n].buffer.read' || true")


def test_hosts_pass_a_content_on(pool: Pool, ssh_hosts: SshHosts, tarball: Blob, way: Given) -> None:
    assert fan_out(pool, blob=tarball, **way) == FanOutResult(had=0, sent=1, relayed=3, missing=0)
    for node in ssh_hosts.names:
        assert blobs(ssh_hosts, node) == [tarball.digest]
        there = ssh_hosts.home(node) / ".accel/blobs" / tarball.digest
        assert hashlib.sha256(there.read_bytes()).hexdigest() == tarball.digest
        assert there.stat().st_mode & 0o777 == 0o600
        until(lambda node=node: not processes(ssh_hosts, node), f"nothing runs on {node}")  # type: ignore[misc]
    assert isinstance(tarball.source, Path)
    tarball.source.unlink()  # it is not even read
    assert fan_out(pool, blob=tarball, **way) == FanOutResult(had=4, sent=0, relayed=0, missing=0)


@pytest.mark.parametrize(
    ("count", "size", "by_tree"),
    [(15, 1 << 30, False), (16, 900_000, False), (16, 1_000_000, True), (64, 250_000, True), (1000, 10_000, False)],
)
def test_a_tree_is_for_many_hosts_and_much_to_send(count: int, size: int, by_tree: bool) -> None:
    assert fanout.worthwhile(count, Blob(digest="0" * 64, size=size, source=b"")) is by_tree


def test_who_has_it_passes_it_on_and_nothing_is_sent_from_here(pool: Pool, tarball: Blob, way: Given) -> None:
    Files(pool.remote("node3")).unpack(tarball, "code")
    assert fan_out(pool, blob=tarball, **way) == FanOutResult(had=1, sent=0, relayed=3, missing=0)


def test_a_host_that_listens_in_vain_gets_it_from_here(
    pool: Pool, ssh_hosts: SshHosts, tarball: Blob, way: Given
) -> None:
    """The others do not reach it, nor anybody who would have got it from it; they get it from each other."""
    first = next(iter(way["addresses"]))
    found = fan_out(pool, blob=tarball, **{**way, "addresses": {**way["addresses"], first: "203.0.113.1"}})
    assert (found.missing, found.sent + found.relayed) == (0, 4), found
    assert found.sent >= 2  # the first, and at least one of the others
    assert [blobs(ssh_hosts, node) for node in ssh_hosts.names] == [[tarball.digest]] * 4


def test_hosts_whose_ports_are_all_taken_get_it_directly(
    pool: Pool, ssh_hosts: SshHosts, tarball: Blob, way: Given
) -> None:
    hosts = list(way["addresses"])
    found = fan_out(pool, blob=tarball, **{**way, "ports": dict.fromkeys(hosts, ())})
    assert found.sent + found.missing == 4
    assert found.relayed == 0
    for host in hosts:
        Files(pool.remote(host)).unpack(tarball, "code")  # what follows a spread, and sends what is lacking
        assert blobs(ssh_hosts, host.name) == [tarball.digest]


def test_a_full_disk_in_the_middle_of_the_tree(pool: Pool, ssh_hosts: SshHosts, tarball: Blob, way: Given) -> None:
    ssh_hosts["node1"].run("sh", "-c", "mkdir -p /dev/shm/root && mount -t tmpfs -o size=1m tmpfs /dev/shm/root")
    found = fan_out(pool, blob=tarball, **{**way, "root": "/dev/shm/root"})
    assert (found.missing, found.sent + found.relayed) == (1, 3), found
    assert ssh_hosts["node1"].run("find", "/dev/shm/root", "-type", "f") == ""


def test_a_content_that_is_damaged_on_its_way_is_not_kept(
    pool: Pool, ssh_hosts: SshHosts, tarball: Blob, way: Given
) -> None:
    wrong = Blob(digest="0" * 64, size=tarball.size, source=tarball.source)
    assert fan_out(pool, blob=wrong, **way).missing == 4
    assert [blobs(ssh_hosts, node) for node in ssh_hosts.names] == [[]] * 4


def test_a_stranger_gets_nothing(pool: Pool, ssh_hosts: SshHosts, tarball: Blob) -> None:
    """Somebody who connects without the token learns no byte of it; the program ends with the conversation."""
    Files(pool.remote("node1")).unpack(tarball, "code")
    request = {"root": "~/.accel", "digest": tarball.digest, "size": tarball.size, "ports": [24001], "token": "ab" * 32}
    program = host_programs("listen", "program", "relay")
    session = pool.remote("node1").open(["python3", "-I", "-S", "-c", program_loader(program)])
    session.write(program + json.dumps(request).encode() + b"\n")
    assert json.loads(session.read_line(20)) == {"have": True, "port": 24001}
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(64)):
        with socket.create_connection((ssh_hosts["node1"].address, 24001), timeout=20) as stranger:
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    session.close()
    until(lambda: not answers(ssh_hosts["node1"].address, 24001), "nobody listens any more")


def test_a_client_that_goes_away_leaves_nobody_listening(
    ssh_hosts: SshHosts, tarball: Blob, way: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone when the hosts have been told from whom they get it, and the first one has had a part."""
    closed = threading.Event()

    def half(_: object) -> Iterator[bytes]:
        yield b"x" * 1_000_000
        closed.wait(60)

    monkeypatch.setattr(remote_files, "chunks", half)
    pool = Pool(config=str(ssh_hosts.config))
    thread = threading.Thread(target=lambda: fan_out(pool, blob=tarball, **way))
    thread.start()
    until(lambda: all(blobs(ssh_hosts, node) for node in ssh_hosts.names), "all have a part of it")
    pool.close()
    closed.set()
    thread.join(60)
    assert not thread.is_alive()
    for node in ssh_hosts.names:
        until(lambda node=node: not processes(ssh_hosts, node), f"nothing runs on {node}")  # type: ignore[misc]
        assert blobs(ssh_hosts, node) == []


def test_a_submit_passes_code_on(
    submit: Submit, ssh_hosts: SshHosts, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "FROM_HOSTS", 2)
    monkeypatch.setattr(fanout, "FROM_BYTES", 2_000_000)
    found: list[FanOutResult] = []
    real = fanout.fan_out
    monkeypatch.setattr(fanout, "fan_out", lambda *words, **given: found.append(real(*words, **given)))
    (project / "large").write_bytes(os.urandom(2_000_000))
    job = submit("wc -c <large", nodes=4)
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job) == "2000000\n" * 4
    assert found == [FanOutResult(had=0, sent=1, relayed=3)]
    (project / "large").write_bytes(os.urandom(2_000_000))
    # Two ports are enough for a job, where code needs none.
    direct = submit("true", options={"fan_out": False, "ports": "29500-29501"})
    assert direct.wait(60).state is State.SUCCEEDED
    assert len(found) == 1


def test_a_host_without_a_free_port_leaves_nothing_behind(submit: Submit, ssh_hosts: SshHosts) -> None:
    with pytest.raises(
        SubmitError, match=r"^node1: none of its ports 22 is free; name others .*; nothing was started$"
    ):
        submit("true", options={"ports": "22-23"})
    for node in ("node1", "node2"):
        assert list((ssh_hosts.home(node) / ".accel/jobs").iterdir()) == []


def small_disk(hosts: SshHosts, node: str, megabytes: int) -> str:
    """A directory on a small disk of that host's own; on the others it is on a large one."""
    for name in hosts.names:
        size = f"{megabytes}m" if name == node else "100m"
        script = f"mkdir -p /dev/shm/root && mount -t tmpfs -o size={size} tmpfs /dev/shm/root"
        hosts[name].run("sh", "-c", script)
    return "/dev/shm/root"


@pytest.mark.parametrize(
    ("megabytes", "said"),
    [
        (2, r"node2: disk full: /dev/shm/root/blobs/\w+ needs 5.0 MB, but \d.\d MB are free"),
        (7, r"node2: disk full: /dev/shm/root/jobs/\w+/code needs 5.0 MB, but \d.\d MB are free"),
    ],
)
def test_a_host_whose_disk_is_full_gets_no_job_and_nobody_else_does(
    submit: Submit, ssh_hosts: SshHosts, project: Path, megabytes: int, said: str
) -> None:
    root = small_disk(ssh_hosts, "node2", megabytes)
    (project / "large").write_bytes(os.urandom(5_000_000))
    with pytest.raises(SubmitError, match=said + "; nothing was started$") as error:
        submit("true", options={"root": root})
    assert "\n" not in str(error.value)
    for node in ("node1", "node2"):
        left = ssh_hosts[node].run("find", root, "-path", f"{root}/jobs/*").split()
        assert left == [], (node, left)
        assert ".part" not in ssh_hosts[node].run("find", root)


def test_a_host_whose_disk_is_full_fails_its_own_jobs_of_a_sweep(
    ssh_hosts: SshHosts, home: Path, project: Path
) -> None:
    root = small_disk(ssh_hosts, "node2", 2)
    (project / "large").write_bytes(os.urandom(5_000_000))
    options = host_options(ssh_hosts) | {"hosts": "node[1-2]", "root": root, "concurrency": 1}
    base = JobSpec(argv=("true",), entry="command", procs_per_node=1, code=str(project), options=options,
                   env={"PYTHONPATH": str(ROOT)}, grace_s=2.0)  # fmt: skip
    jobs = submit_sweep([base] * 4, "ssh", Store.default(), start=project)
    try:
        failed = [job for job in jobs if job.record.status.state is State.FAILED]
        assert [job.record.status.reason for job in failed] == [Reason.NODE_FAILURE] * 2
        for job in failed:
            assert job.record.warning.startswith("node2: disk full: ")
            assert job.record.warning.endswith("; nothing was started")
        assert [job.wait(60).state for job in jobs if job not in failed] == [State.SUCCEEDED] * 2
        assert ssh_hosts["node2"].run("find", root, "-path", f"{root}/jobs/*") == ""
    finally:
        close(jobs[0])
        for machine in ssh_hosts.machines:
            machine.kill()


def test_room_that_ends_on_the_way_leaves_nothing_half(pool: Pool, ssh_hosts: SshHosts) -> None:
    """As with a quota, or somebody else who writes: what was free at the beginning is not."""
    small_disk(ssh_hosts, "node1", 8)
    files = Files(pool.remote("node1"), root="/dev/shm/root")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for number in range(1500):  # each takes a page
            tar.addfile(tarfile.TarInfo(f"empty/{number}"))
            info = tarfile.TarInfo(f"small/{number}")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    blob = Blob.of(raw.getvalue())
    with pytest.raises(RemoteError, match=r"^node1: disk full: cannot write .*free; quota\?\)$"):
        files.unpack(blob, "code")
    left = ssh_hosts["node1"].run("find", "/dev/shm/root", "-type", "f").split()
    assert left == [f"/dev/shm/root/blobs/{blob.digest}"]
