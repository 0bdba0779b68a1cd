"""Files on real hosts: whole or not there, sent once, private, and nothing outside their directory."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from schedulers import node as node_programs
from schedulers.errors import SnapshotError
from schedulers.hosts.errors import HostUnreachable, RemoteError
from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.remote_files import Blob, Files
from schedulers.hosts.transport import Pool
from schedulers.slurm import batch, login
from schedulers.store.snapshot import pack
from tests.clusters.netns import wait_until
from tests.clusters.ssh import SshHosts

# A tar file ends there, whatever follows: an archive of nothing, of any content.
NOTHING = bytes(1024)


@pytest.fixture
def files(pool: Pool) -> Files:
    return Files(pool.remote("node1"))


@pytest.fixture
def there(ssh_hosts: SshHosts) -> Path:
    return ssh_hosts.home("node1") / ".accel"


def test_programs_for_hosts_need_no_more_than_python_3_8() -> None:
    packages = (node_programs, login, batch)
    sent = tuple(package.__name__ for package in packages)
    for package in packages:
        for path in Path(package.__file__ or "").parent.glob("*.py"):
            tree = ast.parse(path.read_text(), feature_version=(3, 8))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.level:
                    name = importlib.util.resolve_name("." * node.level + (node.module or ""), package.__name__)
                    assert name.startswith(sent), path  # what is sent with it


def test_files_are_written_whole_and_privately(files: Files, there: Path) -> None:
    odd = 'it\'s a "file" $(x)\n.txt'
    files.put({"jobs/a/plan.json": b"{}", f"jobs/{odd}": b"\0\xff", "empty": b""})
    assert (there / "jobs/a/plan.json").read_bytes() == b"{}"
    assert (there / "jobs" / odd).read_bytes() == b"\0\xff"
    assert (there / "empty").read_bytes() == b""
    assert {path.name: path.stat().st_mode & 0o777 for path in (there, there / "jobs", there / "jobs/a")} == {
        ".accel": 0o700,
        "jobs": 0o700,
        "a": 0o700,
    }
    assert (there / "empty").stat().st_mode & 0o777 == 0o600
    files.put({"empty": b"no more"})
    assert (there / "empty").read_bytes() == b"no more"
    assert not list(there.rglob("*.part"))


@pytest.mark.parametrize("path", ["", "/etc/x", "../x", "a/../../x", "a//b", "./a"])
def test_nothing_outside_the_directory_is_touched(files: Files, path: str) -> None:
    refused: list[Callable[[], object]] = [
        lambda: files.put({path: b"x"}),
        lambda: files.unpack(Blob.of(NOTHING), path),
        lambda: files.remove(path),
    ]
    for act in refused:
        with pytest.raises(RemoteError, match=r"^node1: .* is not a path inside "):
            act()


def test_a_blob_is_sent_once_and_verified(files: Files, there: Path, tmp_path: Path) -> None:
    source = tmp_path / "large"
    source.write_bytes(NOTHING + os.urandom(1 << 20) * 20)
    blob = Blob.of(source)
    assert blob.size == 1024 + (20 << 20)
    assert files.unpack(blob, "a") is True
    arrived = there / "blobs" / blob.digest
    assert hashlib.sha256(arrived.read_bytes()).hexdigest() == blob.digest
    assert arrived.stat().st_mode & 0o777 == 0o600
    source.unlink()  # it is not even read
    assert files.unpack(blob, "b") is False


def test_a_blob_that_arrives_damaged_is_not_there(files: Files, there: Path) -> None:
    wrong = Blob(digest="0" * 64, size=3, source=b"abc")
    with pytest.raises(RemoteError, match=r"^node1: .*/blobs/0+ arrived damaged$"):
        files.unpack(wrong, "a")
    assert not list((there / "blobs").iterdir())


def test_a_file_that_changes_while_it_is_sent(files: Files, there: Path, tmp_path: Path) -> None:
    source = tmp_path / "log"
    source.write_bytes(b"x" * 100)
    blob = Blob.of(source)
    source.write_bytes(b"x" * 50)
    with pytest.raises(SnapshotError, match=r"log was changed while it was sent to node1$"):
        files.unpack(blob, "a")
    wait_until("nothing is left", lambda: not list((there / "blobs").glob("*")))


def test_a_transfer_that_is_interrupted_leaves_nothing(pool: Pool, ssh_hosts: SshHosts, there: Path) -> None:
    """The server's processes are killed while the blob is on its way; then it is sent again."""
    blob = Blob.of(NOTHING + os.urandom(1 << 20) * 100)
    begun = threading.Event()

    def cut() -> None:
        wait_until("a part of it", lambda: any(there.glob("blobs/.*.part")))
        ssh_hosts.end_sessions("node1")
        begun.set()

    thread = threading.Thread(target=cut)
    thread.start()
    files = Files(pool.remote("node1"))
    with pytest.raises((HostUnreachable, RemoteError)):
        files.unpack(blob, "a")
    thread.join()
    assert begun.is_set()
    wait_until("nothing is left", lambda: not list((there / "blobs").glob("*")))
    assert files.unpack(blob, "a") is True


def test_two_that_send_the_same_at_once_get_one_whole_blob(pool: Pool, there: Path) -> None:
    blob = Blob.of(NOTHING + os.urandom(1 << 20) * 5)
    hosts = parse_hosts("node1") * 4
    assert True in [outcome.get() for outcome in pool.map(lambda remote: Files(remote).unpack(blob, "a"), hosts)]
    assert [path.name for path in (there / "blobs").iterdir()] == [blob.digest]


def test_a_full_disk_is_said_and_leaves_nothing(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node1"].run("sh", "-c", "mkdir -p /dev/shm/small && mount -t tmpfs -o size=2m tmpfs /dev/shm/small")
    files = Files(pool.remote("node1"), root="/dev/shm/small")
    files.put({"kept": b"as it was"})
    for act in (
        lambda: files.unpack(Blob.of(b"x" * 10_000_000), "a"),
        lambda: files.put({"kept": b"x" * 10_000_000}),
    ):
        with pytest.raises(
            RemoteError, match=r"^node1: disk full: /dev/shm/small/.* needs 10.0 MB, but 2.\d MB are free$"
        ):
            act()
    assert ssh_hosts["node1"].run("cat", "/dev/shm/small/kept") == "as it was"
    left = ssh_hosts["node1"].run("find", "/dev/shm/small", "-type", "f").split()
    assert left == ["/dev/shm/small/kept"]


def test_removing_is_repeatable(files: Files, there: Path) -> None:
    files.put({"d/e/f": b"x", "g": b"y"})
    assert [files.remove("d"), files.remove("d", "g")] == [[True], [False, True]]
    assert not list(there.iterdir())


@pytest.fixture
def snapshot(tmp_path: Path) -> Blob:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "empty").mkdir()
    (code / "pkg" / "it's a file.py").write_text("print('hello')\n")
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o755)
    (code / "link").symlink_to("pkg/it's a file.py")
    (code / "é").write_bytes(b"")
    return Blob.of(pack(code, tmp_path / "home").path)


def test_a_snapshot_is_unpacked_as_it_was(files: Files, there: Path, snapshot: Blob) -> None:
    assert files.unpack(snapshot, "jobs/1/code") is True
    code = there / "jobs/1/code"
    assert (code / "link").read_text() == "print('hello')\n"
    assert os.readlink(code / "link") == "pkg/it's a file.py"
    assert (code / "run.sh").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in code.iterdir()) == ["empty", "link", "pkg", "run.sh", "é"]
    assert files.unpack(snapshot, "jobs/1/code") is False
    assert files.unpack(snapshot, "jobs/2/code") is False  # sent before, and there now all the same
    assert (there / "jobs/2/code/run.sh").exists()
    files.put({"jobs/3/code": b"a file"})
    with pytest.raises(RemoteError, match=r"jobs/3/code exists with other content$"):
        files.unpack(snapshot, "jobs/3/code")


def test_a_blob_that_a_disk_damaged_is_removed_and_sent_again(files: Files, there: Path, snapshot: Blob) -> None:
    files.unpack(snapshot, "earlier")
    (there / "blobs" / snapshot.digest).write_bytes(b"rotten")
    with pytest.raises(RemoteError, match=r"was damaged on this disk and is removed: send it again$"):
        files.unpack(snapshot, "code")
    assert not (there / "code").exists()
    assert files.unpack(snapshot, "code") is True


def _tar(*members: tuple[tarfile.TarInfo, bytes]) -> Blob:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return Blob.of(raw.getvalue())


def _link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info, b""


@pytest.mark.parametrize(
    "members",
    [
        [(tarfile.TarInfo("../evil"), b"x")],
        [(tarfile.TarInfo("/evil"), b"x")],
        [_link("out", "/etc")],
        [_link("out", "../../..")],
        [_link("d", ".."), (tarfile.TarInfo("d/evil"), b"x")],
    ],
)
def test_an_archive_that_would_write_outside_is_refused(
    files: Files, there: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    with pytest.raises(RemoteError):
        files.unpack(_tar(*members), "code")
    assert not (there / "code").exists()
    assert not list(there.rglob("evil"))
    assert not list(there.rglob("*.part"))


def test_a_host_that_is_far_away(pool: Pool, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node4"].delay(50)
    remote = pool.remote("node4")
    files = Files(remote)
    blob = Blob.of(NOTHING + os.urandom(300_000))
    assert [files.unpack(blob, "a"), files.unpack(blob, "b")] == [True, False]
    files.put({"c": b"x", "d": b"y"})
    assert [(ssh_hosts.home("node4") / ".accel" / name).read_bytes() for name in "cd"] == [b"x", b"y"]
    assert remote.connection().round_trip_s >= 0.1


def test_a_host_without_that_python_says_so(pool: Pool) -> None:
    with pytest.raises(RemoteError, match=r"^node1: python9: .*python9: not found$") as error:
        Files(pool.remote("node1"), python="python9").put({"a": b""})
    assert error.value.status == 127
