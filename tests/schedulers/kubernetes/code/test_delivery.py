"""How code comes into the pods: the ways there are, and the program that unpacks it there."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from schedulers import SpecError
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.store.snapshot import compress, pack
from tests.schedulers.kubernetes.support import least, options
from tests.schedulers.store.test_snapshot_unpack import HOSTILE_MEMBERS

_STORE = {"url": "s3://bucket/code", "image": "aws"}


def tree(tmp_path: Path) -> Path:
    top = tmp_path / "project"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "train.py").write_text("print('a')\n")
    (top / "deep" / "er" / "run.sh").write_text("#!/bin/sh\n")
    (top / "deep" / "er" / "run.sh").chmod(0o755)
    (top / "ünï.bin").write_bytes(bytes(range(256)) * 5000)
    (top / "link").symlink_to("deep/er/run.sh")
    return top


def unpack(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", delivery.UNPACK, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_snapshot_arrives_whole(tmp_path: Path) -> None:
    data = compress(pack(tree(tmp_path), tmp_path / "home").path).read_bytes()
    made = delivery.config_maps("run", {"a": "b"}, None, data + bytes(1 << 20))
    assert [each["metadata"]["name"] for each in made] == ["run-code-0", "run-code-1"]
    parts = []
    for index, each in enumerate(delivery.config_maps("run", {}, None, data)):
        part = tmp_path / f"code-{index}"
        part.write_bytes(base64.b64decode(each["binaryData"][f"code-{index}"]))
        parts.append(str(part))
    target = tmp_path / "pod" / "code"
    target.parent.mkdir()
    done = unpack(delivery.digest_of(data), str(target), *parts)
    assert (done.returncode, done.stderr) == (0, "")
    assert (target / "train.py").read_text() == "print('a')\n"
    assert (target / "deep/er/run.sh").stat().st_mode & 0o111
    assert (target / "ünï.bin").read_bytes() == bytes(range(256)) * 5000
    assert (target / "link").readlink() == Path("deep/er/run.sh")
    assert [path.name for path in target.parent.iterdir()] == ["code"]
    (target / "train.py").write_text("changed")
    assert unpack(delivery.digest_of(data), str(target), "/nowhere").returncode == 0
    assert (target / "train.py").read_text() == "changed", "a pod that is made anew finds what was there"


@pytest.mark.parametrize("hostile", HOSTILE_MEMBERS)
def test_hostile_code_writes_nothing_outside(tmp_path: Path, hostile: str) -> None:
    part, target = tmp_path / "code-0", tmp_path / "below/pod/code"
    target.parent.mkdir(parents=True)
    with tarfile.open(part, "w:gz") as tar:
        for member in HOSTILE_MEMBERS[hostile]:
            tar.addfile(member, io.BytesIO())
    done = unpack(delivery.digest_of(part.read_bytes()), str(target), str(part))
    harmless = hostile in ("dot", "empty part")
    assert (done.returncode == 0, target.exists()) == (harmless, harmless), done.stderr
    assert harmless or "tarfile." in done.stderr.splitlines()[-1]
    outside = {path.name for path in tmp_path.rglob("*") if not path.is_relative_to(target.parent)}
    assert outside == {"below", "code-0"}
    assert not Path("/tmp/pwned").exists()


def test_code_that_is_not_what_was_submitted_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "code-0"
    part.write_bytes(b"other")
    done = unpack("0" * 64, str(tmp_path / "code"), str(part))
    assert done.returncode == 1
    assert done.stderr.startswith("accel: the code is not what was submitted: its sha256 is ")
    assert not (tmp_path / "code").exists()


def test_the_same_code_is_packed_alike(tmp_path: Path) -> None:
    top = tree(tmp_path)
    first, second = (compress(pack(top, tmp_path / home).path) for home in ("home", "other"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("given", "size", "kind", "parts"),
    [
        ({}, 10, "configmap", 1),
        ({}, 1 << 20, "configmap", 2),
        ({"code_claim": "c"}, 1 << 20, "configmap", 2),
        ({"code_claim": "c"}, (1 << 20) + 1, "pvc", 1),
        ({"code_store": _STORE}, 1 << 30, "store", 1),
        ({"code": "pvc", "code_claim": "c"}, 10, "pvc", 1),
        ({"code": "image"}, 1 << 30, "image", 1),
    ],
)
def test_the_way_by_size(given: dict[str, object], size: int, kind: str, parts: int) -> None:
    made = delivery.choose_delivery(options(**given), size, "d", "k")
    assert (made.kind, made.parts) == (kind, parts)


@pytest.mark.parametrize("given", [{}, {"code": "configmap", "code_claim": "c"}])
def test_code_that_is_too_large_says_what_to_do(given: dict[str, object]) -> None:
    with pytest.raises(SpecError) as caught:
        delivery.choose_delivery(options(**given), 3 << 20, "d", "k")
    assert "the code is 3.0 MiB, packed, and ConfigMaps hold 1 MiB" in str(caught.value)
    assert "code_claim" in str(caught.value)


def test_the_working_directory() -> None:
    brought = delivery.Code(kind="configmap")
    assert delivery.workdir(brought, least(), ".") == "/accel/code"
    assert delivery.workdir(brought, least(), "a/b") == "/accel/code/a/b"
    there = delivery.Code(kind="image")
    assert delivery.workdir(there, least(code="image"), ".") is None
    assert delivery.workdir(there, least(code="image", code_dir="/app/"), "a") == "/app/a"
