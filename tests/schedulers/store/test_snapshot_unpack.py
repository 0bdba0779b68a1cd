"""Unpacking a snapshot: once, whole, and never outside its directory."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from schedulers.errors import SnapshotError
from schedulers.node import archive
from schedulers.node.files import extract
from schedulers.node.program import InvalidRequest
from schedulers.store.snapshot import _digest, pack, unpack
from schedulers.store.source_files import Entry

from .test_snapshot import code, home, write

__all__ = ["code", "home"]


def test_unpacking_again_changes_nothing(code: Path, home: Path, tmp_path: Path) -> None:
    write(code, "a", "1")
    first = pack(code, home)
    unpack(first.path, tmp_path / "out")
    write(tmp_path / "out", "a", "written by the job")
    unpack(first.path, tmp_path / "out")
    assert (tmp_path / "out/a").read_text() == "written by the job"
    write(code, "a", "2")
    with pytest.raises(SnapshotError, match="it exists and is not this snapshot"):
        unpack(pack(code, home).path, tmp_path / "out")
    with pytest.raises(SnapshotError, match="it exists"):
        unpack(first.path, code)


def test_a_damaged_snapshot_is_refused(code: Path, home: Path, tmp_path: Path) -> None:
    write(code, "a", "x" * 2000)
    snapshot = pack(code, home)
    whole = snapshot.path.read_bytes()
    for damaged in (b"", b"rubbish", whole[:700], whole[:2000], whole.replace(b"xxx", b"xyx", 1), whole[512:]):
        snapshot.path.write_bytes(damaged)
        with pytest.raises(SnapshotError, match=r"is damaged; delete it and submit again \([^\n]*\)$"):
            unpack(snapshot.path, tmp_path / "out")
    snapshot.path.unlink()
    with pytest.raises(SnapshotError, match="snapshot not found"):
        unpack(snapshot.path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["code", "home"]


def member(name: str, type: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = type, link, len(content)
    return info


def with_headers(info: tarfile.TarInfo, **headers: str) -> tarfile.TarInfo:
    info.pax_headers = headers
    return info


def sparse(path: Path, kind: str, name: str = "a", size: int = 300_000_000) -> None:
    """Write an archive of one member that holds no data and claims a size: GNU's form, or one of PAX."""
    headers = {
        "pax 0.1": {"GNU.sparse.size": f"{size}", "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{size},0"},
        "pax 1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": f"{size}"},
    }
    info = tarfile.TarInfo(name)
    if kind == "pax 1.0":
        info.pax_headers, info.size = {**headers[kind], "GNU.sparse.name": name}, 512
        data = f"1\n{size}\n0\n".encode().ljust(512, b"\0")
        path.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + data + bytes(1024))
    elif kind == "pax 0.1":
        info.pax_headers = headers[kind]
        path.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    else:
        info.type = tarfile.GNUTYPE_SPARSE
        block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        block[386:410] = b"%011o\0%011o\0" % (size, 0)  # one piece, without data, at the end
        block[483:495] = b"%011o\0" % size
        block[148:156] = b"        "
        block[148:156] = b"%06o\0 " % sum(block)
        path.write_bytes(bytes(block) + bytes(1024))


@pytest.mark.parametrize("kind", ["gnu", "pax 0.1", "pax 1.0"])
def test_an_archive_cannot_write_more_than_it_holds(tmp_path: Path, kind: str) -> None:
    archive = tmp_path / "made.tar"
    sparse(archive, kind)
    with tarfile.open(archive) as tar:  # it is what it is meant to be
        assert [(info.size, info.issparse()) for info in tar] == [(300_000_000, True)]
    with pytest.raises(SnapshotError, match="'a' would write more than the archive holds"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "host").mkdir()
    with pytest.raises(InvalidRequest, match="would write more than the archive holds"):
        extract(str(archive), str(tmp_path / "host"))
    assert not any((tmp_path / "host").iterdir())


HOSTILE_MEMBERS = {
    "absolute": [member("/tmp/pwned")],
    "upward": [member("../pwned")],
    "upward inside": [member("a/../../pwned")],
    "dot": [member("./a")],
    "empty part": [member("a//b")],
    "through a link": [member("l", tarfile.SYMTYPE, "/tmp"), member("l/pwned")],
    "a link outside": [member("l", tarfile.SYMTYPE, "../..")],
    "a hard link": [member("l", tarfile.LNKTYPE, "/etc/passwd")],
    "a device": [member("d", tarfile.CHRTYPE)],
    "a pipe": [member("p", tarfile.FIFOTYPE)],
    "the same file twice": [member("a"), member("a")],
}


@pytest.mark.parametrize("hostile", HOSTILE_MEMBERS)
def test_a_hostile_archive_writes_nothing(tmp_path: Path, hostile: str) -> None:
    """Whoever can write archives can give them the right digest too, so that is not what must stop them."""

    members = HOSTILE_MEMBERS[hostile]
    entries = [
        (
            Entry(info.name, "link" if info.issym() else "file", info.mode & 0o777, 0, info.linkname),
            hashlib.sha256(info.linkname.encode()).digest(),
        )
        for info in members
    ]
    archive = tmp_path / f"{_digest(entries)}.tar"
    with tarfile.open(archive, "w") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO())
    with pytest.raises(SnapshotError):
        unpack(archive, tmp_path / "below/out")
    assert not [path for path in tmp_path.rglob("*") if path.name not in (archive.name, "below")]
    assert not Path("/tmp/pwned").exists()


def artefact(*members: tarfile.TarInfo) -> tarfile.TarFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return tarfile.open(fileobj=io.BytesIO(buffer.getvalue()), mode="r:gz")


def test_an_artefact_is_extracted(tmp_path: Path) -> None:
    program = member("./model/run", content=b"x")
    program.mode, program.uid, program.gid = 0o6777, 12345, 12345
    links = [member("model/link", tarfile.SYMTYPE, "../top"), member("model/hard", tarfile.LNKTYPE, "top")]
    with artefact(member("top", content=b"x"), member("./model", tarfile.DIRTYPE), program, *links) as tar:
        archive.extract(tar, str(tmp_path / "out"))
    info = (tmp_path / "out/model/run").stat()
    assert (info.st_mode & 0o7777, info.st_uid, info.st_gid) == (0o755, os.getuid(), os.getgid())
    assert (tmp_path / "out/model/link").resolve() == tmp_path / "out/top"
    assert (tmp_path / "out/model/hard").read_bytes() == b"x"


@pytest.mark.parametrize(
    "members",
    [
        [member("../x")],
        [member("/x")],
        [member("hard", tarfile.LNKTYPE, "missing")],
        [with_headers(member("nul"), path="a\0b")],
        [with_headers(member("nul in a link", tarfile.SYMTYPE, "a"), linkpath="a\0b")],
        [member("a/../../x")],
        [member("link", tarfile.SYMTYPE, "/etc")],
        [member("a/link", tarfile.SYMTYPE, "../../x")],
        [member("hard", tarfile.LNKTYPE, "../secret")],
        [member("a", tarfile.SYMTYPE, "b/.."), member("b", tarfile.SYMTYPE, ".."), member("a/x")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
    ],
    ids=lambda members: members[-1].name,
)
def test_an_artefact_that_leads_outside_is_refused(members: list[tarfile.TarInfo], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("kept")
    with artefact(*members) as tar, pytest.raises(tarfile.TarError):
        archive.extract(tar, str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "secret"}


def test_an_unpacked_tree_is_the_snapshot_that_it_was_unpacked_from(code: Path, home: Path, tmp_path: Path) -> None:
    """Files that were packed because git tracks them are packed again where there is no git."""
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    for name in (".env", ".hidden/a", "run.py"):
        write(code, name)
    subprocess.run(["git", "-C", str(code), "add", "-A"], check=True)
    snapshot = pack(code, home)
    umask = os.umask(0o077)
    try:
        unpack(snapshot.path, tmp_path / "out")
    finally:
        os.umask(umask)
    assert pack(tmp_path / "out", home).digest == snapshot.digest
    # Elsewhere, the archive is written again, the same to the byte.
    again = pack(tmp_path / "out", tmp_path / "other")
    assert again.path.read_bytes() == snapshot.path.read_bytes()
    # A tree that was changed is a code directory as any other.
    write(tmp_path / "out", "run.py", "changed")
    with tarfile.open(pack(tmp_path / "out", home).path) as tar:
        assert tar.getnames() == ["run.py"]


def test_an_empty_directory_keeps_its_permissions(code: Path, home: Path, tmp_path: Path) -> None:
    (code / "empty").mkdir()
    (code / "empty").chmod(0o777)
    snapshot = pack(code, home)
    unpack(snapshot.path, tmp_path / "out")
    assert (tmp_path / "out/empty").stat().st_mode & 0o777 == 0o777
    assert pack(tmp_path / "out", home).digest == snapshot.digest


def test_more_files_than_allowed_are_not_unpacked(code: Path, home: Path, tmp_path: Path) -> None:
    for name in "abc":
        write(code, name)
    snapshot = pack(code, home)
    with pytest.raises(SnapshotError, match="holds more than 2 files"):
        unpack(snapshot.path, tmp_path / "out", max_files=2)
    assert not (tmp_path / "out").exists()
    unpack(snapshot.path, tmp_path / "out", max_files=3)
