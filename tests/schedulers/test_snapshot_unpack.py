"""Unpacking a snapshot: once, whole, and never outside its directory."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from schedulers.codefiles import Entry
from schedulers.errors import SnapshotError
from schedulers.snapshot import _digest, pack, unpack

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
    with pytest.raises(SnapshotError, match="it is there, and is not this snapshot"):
        unpack(pack(code, home).path, tmp_path / "out")
    with pytest.raises(SnapshotError, match="it is there"):
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
    with pytest.raises(SnapshotError, match="is not there"):
        unpack(snapshot.path, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["code", "home"]


def member(name: str, type: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = type, link, len(content)
    return info


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
