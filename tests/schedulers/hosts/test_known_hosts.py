from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from schedulers.hosts.host_keys import Verdict, known_types, lookup_names, read, verify_key

A, B, C = "QUFB", "QkJC", "Q0ND"
FILE = f"""\
# a comment
gpu1,10.0.0.1 ssh-ed25519 {A} somebody@somewhere
*.lab,!bad.lab ssh-ed25519 {B}
[gpu2]:2222 ssh-rsa {A}
@revoked gpu3 ssh-ed25519 {C}
gpu3 ssh-ed25519 {A}
@cert-authority *.ca ssh-ed25519 {A}
not a line
"""
KNOWN = read(FILE, "f")


@pytest.mark.parametrize(
    ("name", "port", "key", "verdict", "where"),
    [
        ("gpu1", 22, A, Verdict.KNOWN, ["f:2"]),
        ("GPU1", 22, A, Verdict.KNOWN, ["f:2"]),
        ("gpu1", 22, B, Verdict.CHANGED, ["f:2"]),
        ("gpu11", 22, A, Verdict.UNKNOWN, []),
        ("x.lab", 22, B, Verdict.KNOWN, ["f:3"]),
        ("bad.lab", 22, B, Verdict.UNKNOWN, []),
        ("gpu1", 2222, A, Verdict.KNOWN, ["f:2"]),  # its plain name says the same
        ("gpu1", 2222, B, Verdict.UNKNOWN, []),  # another port may be another server
        ("gpu3", 22, C, Verdict.REVOKED, ["f:5"]),
        ("gpu3", 22, A, Verdict.KNOWN, ["f:6"]),
        ("x.ca", 22, A, Verdict.UNKNOWN, ["f:7"]),  # an authority's key is no host's
    ],
)
def test_a_key_is_judged_as_openssh_does(name: str, port: int, key: str, verdict: Verdict, where: list[str]) -> None:
    found, lines = verify_key(KNOWN, lookup_names(name, port, None), "ssh-ed25519", key)
    assert (found, [line.location for line in lines]) == (verdict, where)


def test_the_alias_is_the_only_name_where_there_is_one() -> None:
    assert lookup_names("gpu1", 2222, "pool") == ["pool"]


def test_known_types_come_first() -> None:
    assert known_types(KNOWN, ["[gpu2]:2222"]) == ["ssh-rsa"]


def test_hashed_names_are_openssh_s(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    type, text = key.with_suffix(".pub").read_text().split()[:2]
    file = tmp_path / "known"
    file.write_text(f"gpu1 {type} {text}\n[gpu2]:2222 {type} {text}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert "gpu1" not in file.read_text()
    known = read(file.read_text(), str(file))
    for name, port in (("gpu1", 22), ("gpu2", 2222)):
        assert verify_key(known, lookup_names(name, port, None), type, text)[0] is Verdict.KNOWN
    assert verify_key(known, ["gpu3"], type, text)[0] is Verdict.UNKNOWN
