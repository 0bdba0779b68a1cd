"""The snapshot: which files are in it, that they come back as they were, and what is refused."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.errors import SnapshotError
from schedulers.store.snapshot import Snapshot, pack, unpack
from schedulers.store.source_files import list_code

HOSTILE = [
    "a b.py",
    "a'; touch pwned; '",
    "new\nline",
    "-rf",
    "ünï.py",
    "back\\slash",
    '"quote"',
    "$(x)",
    "#x",
    "!y",
    "trail ",
]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def write(top: Path, path: str, text: str | bytes = "x") -> Path:
    file = top / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def names(snapshot: Snapshot) -> list[str]:
    with tarfile.open(snapshot.path, encoding="utf-8", errors="surrogateescape") as tar:
        return tar.getnames()


def tree(top: Path | str) -> dict[str, tuple[str, object]]:
    """Every file, link and empty directory with what is in it and its permissions."""
    found: dict[str, tuple[str, object]] = {}
    for directory, directories, files in os.walk(top):
        for name in [*directories, *files]:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, top)
            if os.path.islink(path):
                found[relative] = ("link", os.readlink(path))
            elif os.path.isdir(path):
                if not os.listdir(path):
                    found[relative] = ("directory", None)
            else:
                found[relative] = (f"file {os.stat(path).st_mode:o}", Path(path).read_bytes())
    return found


def test_there_and_back(code: Path, home: Path, tmp_path: Path) -> None:
    for name in HOSTILE:
        write(code, f"dir {name}/{name}", name)
    write(code, os.fsdecode(b"bytes-\xff\xfe"), b"\0\xff")
    write(code, "deep/" + "/".join(["d" * 50] * 8) + "/" + "f" * 200, "deep")
    write(code, "empty", "")
    write(code, "run.sh", "#!/bin/sh\n").chmod(0o755)
    write(code, "private", "").chmod(0o600)
    (code / "hollow").mkdir()
    (code / "link").symlink_to("run.sh")
    (code / "hollow-link").symlink_to("hollow")
    (code / "deep/up").symlink_to("../run.sh")
    (code / "dangling").symlink_to("not/there")
    (code / "loop").symlink_to("loop")
    snapshot = pack(code, home)
    unpack(snapshot.path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(code)
    assert snapshot.warnings == ()
    assert snapshot.path == home / f"snapshots/{snapshot.digest}.tar"


NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=12)


@given(
    st.dictionaries(
        NAMES.filter(lambda name: name not in (".", "..", ".accelignore", ".git") and len(name.encode()) < 200),
        st.binary(max_size=50),
        max_size=6,
    )
)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    top = tmp_path_factory.mktemp("tree")
    (top / "code").mkdir()
    for name, content in files.items():
        write(top / "code", f"d/{name}", content)
    write(top / "code", ".accelignore", "!*\n")
    snapshot = pack(top / "code", top / "home")
    unpack(snapshot.path, top / "out")
    assert tree(top / "out") == tree(top / "code")


def test_a_tree_has_one_digest_and_is_packed_once(code: Path, home: Path, tmp_path: Path) -> None:
    write(code, "a.py", "1")
    write(code, "b/c.py", "2")
    first = pack(code, home)
    inode = first.path.stat().st_ino
    os.utime(code / "a.py", (1, 1))
    assert pack(code, home) == first
    assert first.path.stat().st_ino == inode
    other = tmp_path / "other"
    write(other, "b/c.py", "2")
    write(other, "a.py", "1")
    assert pack(other, home).digest == first.digest
    assert pack(other, tmp_path / "second home").path.read_bytes() == first.path.read_bytes()
    assert [name for name in os.listdir(home / "snapshots") if name != ".lock"] == [first.path.name]


def test_every_change_is_another_digest(code: Path, home: Path) -> None:
    seen = [pack(code, home).digest]

    def differs() -> bool:
        seen.append(pack(code, home).digest)
        return len(set(seen)) == len(seen)

    write(code, "a", "1")
    assert differs()
    write(code, "a", "2")
    assert differs()
    (code / "a").chmod(0o755)
    assert differs()
    (code / "a").rename(code / "b")
    assert differs()
    (code / "b").unlink()
    (code / "b").symlink_to("c")
    assert differs()
    (code / "b").unlink()
    (code / "b").mkdir()
    assert differs()


def test_without_git_accelignore_decides(code: Path, home: Path) -> None:
    write(code, ".accelignore", "# data\n*.bin\n/data/\nlogs/**\n!keep.bin\n!__pycache__/\n!.config\n")
    for path in (
        "a.py",
        "a.bin",
        "keep.bin",
        "data/x",
        "sub/data/y",
        "logs/z",
        "sub/__pycache__/a.txt",
        "x.pyc",
        "\\x",
        ".gitignore",
        ".cache/x",
        "sub/.hidden",
        ".config/.x/y",
    ):
        write(code, path)
    snapshot = pack(code, home)
    assert snapshot.warnings == (
        "'.cache', 'sub/.hidden': left out, hidden or named like secrets. To ship one, add `!NAME` to .accelignore",
    )
    assert names(snapshot) == [
        ".config/.x/y",
        "\\x",
        "a.py",
        "keep.bin",
        "sub/__pycache__/a.txt",
        "sub/data/y",
    ]


def test_a_bad_pattern_is_said(code: Path, home: Path) -> None:
    write(code, ".accelignore", "!\n")
    with pytest.raises(SnapshotError, match=r"\.accelignore"):
        pack(code, home)


def test_a_virtual_environment_is_left_out_and_said(code: Path, home: Path) -> None:
    write(code, "env/pyvenv.cfg")
    write(code, "env/lib/x.py")
    write(code, "a.py")
    snapshot = pack(code, home)
    assert names(snapshot) == ["a.py"]
    assert snapshot.warnings == ("'env' is left out: it is a virtual environment",)


SECRETS = [".env", "a/Kubeconfig.yaml", "key.p12", "a.PFX", "my_credentials.json", "Service-account-1.json",
           "secrets.yaml", "conf/secrets.yml", "terraform.tfstate", "x.tfstate.backup", ".docker/config.json",
           ".kube/config", ".git-credentials", "a/.htpasswd", ".vault-token", ".dockercfg", ".netrc",
           ".ssh/config", ".aws/credentials", "a/b/.env", "my key.pem", "id_rsa", "id_rsa.pub",
           "sub/id_ecdsa_sk", "id_ed25519", "id_dsa", ".ENV", ".env.local", ".envrc", "a/.Env.prod/x",
           ".npmrc", ".pypirc", "tls.key", "TLS.KEY", "a/credentials.json", "Credentials.JSON", "CA.PEM"]  # fmt: skip
HARMLESS = ["my.env.py", "env", "key", "keys.py", "a.key.txt", "my_credentials.json.py", "secrets.py",
            "x.env", "a.pem.txt", "pem", "my_id_rsa", "sshrc", "aws/credentials", "tfstate.py"]  # fmt: skip


def test_what_looks_like_a_secret_is_left_out_with_one_warning(
    code: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in [*SECRETS, *HARMLESS]:
        write(code, path)
    pack(code, home)
    snapshot = pack(code, home)  # as for the next job of a sweep: the warning is not repeated
    assert names(snapshot) == sorted(HARMLESS)
    assert len(snapshot.warnings) == 1
    assert re.fullmatch(
        r"'\.ENV', '\.aws', .* and \d+ more: left out, hidden or named like secrets\. "
        r"To ship one, add `!NAME` to \.accelignore",
        snapshot.warnings[0],
    )
    assert caplog.messages == list(snapshot.warnings)


def test_a_secret_may_be_taken_back(code: Path, home: Path) -> None:
    write(code, ".accelignore", "!.env\n!/keys/*.pem\n!.ssh/\nid_rsa\n")
    for path in (".env", "sub/.env", ".ENV", "keys/ca.pem", "other.pem", ".ssh/config", "id_rsa"):
        write(code, path)
    snapshot = pack(code, home)
    assert names(snapshot) == [".env", ".ssh/config", "keys/ca.pem", "sub/.env"]
    assert snapshot.warnings == (  # what is ignored by name needs none
        "'.ENV', 'other.pem': left out, hidden or named like secrets. To ship one, add `!NAME` to .accelignore",
        "'.env', '.ssh/config', 'keys/ca.pem', 'sub/.env': named like secrets, and shipped, as `!NAME` in .accelignore "
        "includes them again",
    )


@pytest.mark.parametrize(
    ("text", "shipped"),
    [
        ("# data\n\ndata\n", ["a.py", "sub/a.py", "sub/b.txt", "sub/data/x", "sub/deep/c.txt"]),
        ("/data/\nsub/data\n", ["a.py", "sub/a.py", "sub/b.txt", "sub/deep/c.txt"]),
        ("*.txt\ndata\n", ["a.py", "sub/a.py", "sub/b.txt", "sub/data/x", "sub/deep/c.txt"]),  # at the top alone
        ("**/*.txt\ndata\n", ["a.py", "sub/a.py", "sub/data/x"]),
        ("*\n!a.py\n!sub/deep/c.txt\n", ["a.py", "sub/deep/c.txt"]),  # below a directory that is left out
        ("!sub\n*\n", []),  # the last that matches
        ("./sub/../data\n sub \n", ["a.py"]),
    ],
)
@pytest.mark.parametrize("git", [False, True])
def test_dockerignore_counts_for_an_image_alone(
    code: Path, home: Path, text: str, shipped: list[str], git: bool
) -> None:
    if git:
        subprocess.run(["git", "init", "-q", code], check=True, capture_output=True)
    everything = ["a.py", "data/x", "sub/a.py", "sub/b.txt", "sub/data/x", "sub/deep/c.txt"]
    for path in everything:
        write(code, path)
    write(code, ".dockerignore", text)

    def listed(image: bool) -> list[str]:
        entries, warnings = list_code(os.path.realpath(code), image=image)
        assert warnings == []
        found = [entry.path for entry in entries if entry.type == "file" and entry.path != ".dockerignore"]
        return sorted(found)

    assert listed(image=True) == shipped
    assert listed(image=False) == everything


@pytest.mark.parametrize("directory", ["/", "~", "~/link"])
def test_the_home_directory_and_the_root_are_refused(
    directory: str, code: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(code))
    (code / "link").symlink_to(".")
    with pytest.raises(SnapshotError, match="directory, which is not packed as code"):
        pack(Path(directory).expanduser(), home)


def test_what_accel_keeps_itself_is_left_out(code: Path) -> None:
    write(code, "a.py")
    write(code, ".accel/jobs/x")
    assert names(pack(code, code / ".accel")) == ["a.py"]
    assert names(pack(code, code / ".accel")) == ["a.py"]


def test_a_home_that_is_the_code_directory(code: Path) -> None:
    write(code, "a.py")
    write(code, "jobs/x")
    assert names(pack(code, code)) == ["a.py"]
    assert names(pack(code, code)) == ["a.py"]


def test_code_inside_the_home_is_code(code: Path) -> None:
    write(code, "jobs/1/code/a.py")
    assert names(pack(code / "jobs/1/code", code)) == ["a.py"]


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside", "up", ".."])
def test_a_link_that_leads_outside_is_refused(code: Path, home: Path, target: str) -> None:
    write(code, "sub/x")
    write(code.parent, "outside")
    if target == "up":
        target = "sub/up"
        (code / "sub/up").symlink_to("../../outside")
    (code / "a-link").symlink_to(target)
    with pytest.raises(SnapshotError, match=r"-link' is a link to|sub/up' is a link to") as raised:
        pack(code, home)
    assert "outside the code directory" in str(raised.value)
    assert not (home / "snapshots").exists()


def test_an_absolute_link_is_refused_even_when_it_leads_inside(code: Path, home: Path) -> None:
    write(code, "a")
    (code / "l").symlink_to(code / "a")
    with pytest.raises(SnapshotError, match="is a link to"):
        pack(code, home)


def test_what_is_no_file_is_left_out_and_said(code: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        snapshot = pack(code, home)
    assert names(snapshot) == []
    assert [warning.split()[0] for warning in snapshot.warnings] == ["'pipe'", "'sock'"]


def test_a_large_tree_is_said_with_its_largest_paths(code: Path, home: Path) -> None:
    for number in range(7):
        with write(code, f"f{number}").open("wb") as file:
            file.truncate(number * 10_000_000)
    assert pack(code, home / "1").warnings == (
        f"the code directory {code} has 210 MB, which every job would copy; the largest: "
        "'f6' (60 MB), 'f5' (50 MB), 'f4' (40 MB), 'f3' (30 MB), 'f2' (20 MB)",
    )
    for number in (6, 5):
        (code / f"f{number}").unlink()
    with (code / "f0").open("wb") as file:
        file.truncate(0)
    assert len(pack(code, home / "2").warnings) == 1  # 100 MB
    with (code / "f1").open("wb") as file:
        file.truncate(9_999_999)
    assert pack(code, home / "2").warnings == ()


def test_no_code_directory(tmp_path: Path, home: Path) -> None:
    with pytest.raises(SnapshotError, match="code directory not found"):
        pack(tmp_path / "none", home)
    with pytest.raises(SnapshotError, match="code directory not found"):
        pack(write(tmp_path, "file"), home)


def test_a_log_that_grows_meanwhile_does_not_harm(code: Path, home: Path, tmp_path: Path) -> None:
    log = write(code, "run.log")
    with subprocess.Popen(["sh", "-c", 'while :; do echo line >> "$1"; done', "sh", str(log)]) as writer:
        try:
            snapshots = [pack(code, home) for _ in range(10)]
        finally:
            writer.kill()
    for number, snapshot in enumerate(snapshots):
        unpack(snapshot.path, tmp_path / str(number))


def test_a_full_disk_leaves_no_half_snapshot(code: Path, small_disk: Path, tmp_path: Path) -> None:
    write(code, "big", b"x" * 1_000_000)
    with pytest.raises(SnapshotError, match="disk full"):
        pack(code, small_disk)
    assert os.listdir(small_disk / "snapshots") == []
    snapshot = pack(code, tmp_path / "home")
    with pytest.raises(SnapshotError, match="disk full"):
        unpack(snapshot.path, small_disk / "out")
    assert os.listdir(small_disk) == ["snapshots"]
