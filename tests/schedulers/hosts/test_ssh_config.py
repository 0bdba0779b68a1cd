from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schedulers.errors import ConfigError
from schedulers.hosts.host_list import Host
from schedulers.hosts.ssh_config import aliases, resolve, split_line
from tests.needs import missing


@pytest.fixture
def config(tmp_path: Path) -> str:
    if shutil.which("ssh") is None:
        missing("openssh-client", "apt-get install openssh-client")
    more = tmp_path / "more"
    more.mkdir()
    more.joinpath("a").write_text("Host deep\n  Port 7\n")
    file = tmp_path / "config"
    file.write_text(
        f"""\
        Include {tmp_path}/more/*
        Host gpu1 gpu2 !gpu3 login* "quoted name"
          HostName %h.lab
          User bob
          Port=2222
          IdentityFile {tmp_path}/%h-%r-%p
          IdentitiesOnly yes
          HostKeyAlias pool
          UserKnownHostsFile {tmp_path}/known /dev/null
          ProxyJump eve@far:7,ssh://near
          ServerAliveInterval 3
          ServerAliveCountMax 4
          ConnectTimeout 9
          RevokedHostKeys ~/revoked
          CertificateFile {tmp_path}/%r-cert.pub
        host=other
          ProxyCommand nc -X 5 %h %p
          IdentityAgent none
        Host asks
          KnownHostsCommand /bin/true %H
        """
    )
    return str(file)


def test_settings_are_those_of_openssh(config: str, tmp_path: Path) -> None:
    found = resolve(Host(name="gpu1"), config)
    assert (found.hostname, found.port, found.user, found.key_alias) == ("gpu1.lab", 2222, "bob", "pool")
    assert found.identities == (str(tmp_path / "gpu1.lab-bob-2222"),)
    assert found.identities_only
    assert str(tmp_path / "known") in found.known_hosts
    assert "/dev/null" not in found.known_hosts
    assert [str(jump) for jump in found.jumps] == ["eve@far:7", "near"]
    assert (found.alive_interval_s, found.alive_count, found.connect_timeout_s) == (3, 4, 9)
    assert found.revoked == str(Path.home() / "revoked")
    assert found.certificates == (str(tmp_path / "bob-cert.pub"),)


def test_what_is_written_wins_over_the_file(config: str) -> None:
    found = resolve(Host(name="gpu1", user="root", port=22), config)
    assert (found.user, found.port) == ("root", 22)


def test_a_proxy_command_has_its_tokens_filled_in(config: str) -> None:
    found = resolve(Host(name="other"), config)
    assert found.proxy_command == "nc -X 5 other 22"
    assert found.agent is None
    assert (found.jumps, found.connect_timeout_s, found.alive_interval_s) == ((), None, None)
    assert (found.revoked, found.certificates) == (None, ())


def test_keys_that_a_command_knows_are_not_passed_over_in_silence(config: str) -> None:
    with pytest.raises(ConfigError, match=r"^asks: KnownHostsCommand is set in the SSH configuration, but accel "):
        resolve(Host(name="asks"), config)


def test_included_files_are_read(config: str) -> None:
    assert resolve(Host(name="deep"), config).port == 7


def test_aliases_are_the_literal_names(config: str) -> None:
    assert aliases(config) == ["deep", "gpu1", "gpu2", "quoted name", "other", "asks"]


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    if shutil.which("ssh") is None:
        missing("openssh-client", "apt-get install openssh-client")
    file = tmp_path / "config"
    file.write_text("Host *\n  Prot 22\n")
    with pytest.raises(ConfigError, match=r"the SSH configuration for a cannot be read: .*config.* line 2.*prot"):
        resolve(Host(name="a"), str(file))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Host a b", ("host", ["a", "b"])),
        ("  host = a # note", ("host", ["a"])),
        ('Include "a b" c', ("include", ["a b", "c"])),
        ("", ("", [])),
        ("# Host a", ("", [])),
        ('Host "a', ("host", [])),
    ],
)
def test_a_line_is_a_keyword_and_values(line: str, expected: tuple[str, list[str]]) -> None:
    assert split_line(line) == expected
