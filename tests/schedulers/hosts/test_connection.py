"""The way to a host: jumps, ports, host keys that are known or not, keys that open it or not, and what gets lost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers.errors import ConfigError
from schedulers.hosts.connection import Timeouts
from schedulers.hosts.errors import HostKeyRefused, HostUnreachable, LoginRefused
from schedulers.hosts.host_list import Host
from schedulers.hosts.transport import Pool
from tests.clusters.netns import wait_until
from tests.clusters.ssh import SshHosts
from tests.waiting import until


@pytest.fixture
def extra(ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


def _with(extra: list[Pool], ssh_hosts: SshHosts, tmp_path: Path, text: str) -> Pool:
    """A pool whose configuration has `text` before the usual one."""
    file = tmp_path / "config"
    file.write_text(text + "\n" + ssh_hosts.config.read_text())
    pool = Pool(config=str(file), timeouts=Timeouts(connect_s=3, alive_s=0.5))
    extra.append(pool)
    return pool


def _came_from(pool: Pool, host: Host | str) -> str:
    return pool.remote(host).run(["sh", "-c", "echo $SSH_CONNECTION"]).stdout.decode().split()[0]


def test_ports_users_and_both_kinds_of_address(pool: Pool, ssh_hosts: SshHosts) -> None:
    here = ssh_hosts.network
    assert _came_from(pool, Host(name="node1", port=2222)) == here.address(0)
    assert _came_from(pool, Host(name=ssh_hosts["node1"].address6)) == here.address6(0)
    assert pool.remote(Host(name="node1", user="worker")).run(["id", "-un"]).stdout == b"worker\n"


def test_one_jump_and_several(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    text = "Host node2\n ProxyJump node1\nHost node4\n ProxyJump worker@node1:2222,node3"
    pool = _with(extra, ssh_hosts, tmp_path, text)
    assert _came_from(pool, "node2") == ssh_hosts["node1"].address
    assert _came_from(pool, "node4") == ssh_hosts["node3"].address


def test_a_jump_host_s_own_jump_is_followed(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host node2\n ProxyJump node1\nHost node1\n ProxyJump node3")
    assert _came_from(pool, "node2") == ssh_hosts["node1"].address
    assert _came_from(pool, "node1") == ssh_hosts["node3"].address


def test_a_jump_for_all_hosts_is_none_for_the_jump_host(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host *\n ProxyJump node3")
    assert _came_from(pool, "node2") == ssh_hosts["node3"].address
    assert _came_from(pool, "node3") == ssh_hosts.network.address(0)


def test_many_hosts_share_one_connection_to_the_jump_host(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host node2 node3 node4\n ProxyJump node1")
    hosts = [Host(name=name) for name in ("node2", "node3", "node4")]
    assert [outcome.get().status for outcome in pool.map(lambda remote: remote.run(["true"]), hosts)] == [0] * 3
    # One connection: sshd's monitor, and its child for some users. What is left of an earlier test's may go at last.
    until(lambda: int(ssh_hosts["node1"].run("pgrep", "-fc", "sshd: root")) <= 2, "there is one connection")


def test_jumps_that_go_round_in_circles(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host node1\n ProxyJump node2\nHost node2\n ProxyJump node1")
    with pytest.raises(ConfigError, match=r"goes round in circles: node1 → node2 → node1"):
        pool.remote("node1").run(["true"])


def test_a_jump_host_that_cannot_reach_the_host_is_named(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host node2\n ProxyJump node1\n Port 1")
    with pytest.raises(HostUnreachable, match=r"^node1: as a jump host to 10.*:1: connection failed$"):
        pool.remote("node2").run(["true"])


def test_a_jump_host_with_an_unknown_key_is_refused(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    text = f"Host node1\n UserKnownHostsFile {tmp_path}/known\nHost node2\n ProxyJump node1"
    pool = _with(extra, ssh_hosts, tmp_path, text)
    with pytest.raises(HostKeyRefused, match=r"^node1: its host key is not known"):
        pool.remote("node2").run(["true"])


def test_a_host_behind_a_jump_host_is_noticed_when_it_falls_silent(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, "Host node2\n ProxyJump node1")
    with pool.remote("node2").open(["sleep", "60"]) as session:
        ssh_hosts["node2"].link(False)
        with pytest.raises(HostUnreachable, match=r"^node2: lost while sleep was running: no answer for [0-9]+ s$"):
            session.finish(120)
    ssh_hosts["node2"].link(True)
    assert pool.remote("node1").run(["true"]).status == 0


def test_no_configuration_of_fabric_s_own_is_read(
    ssh_hosts: SshHosts, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host *\n ProxyCommand false\n ForwardAgent yes\n")
    text = "gateway: 'false'\nuser: nobody-there\nrunners: {}\nconnect_kwargs: {password: p, look_for_keys: true}\n"
    for name in (".fabric.yaml", ".invoke.yaml", "fabric.yaml"):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FABRIC_GATEWAY", "false")
    monkeypatch.setenv("INVOKE_RUN_ECHO", "1")
    monkeypatch.chdir(tmp_path)
    assert _came_from(pool, "node1") == ssh_hosts.network.address(0)


def test_a_proxy_command(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    text = (
        f"Host node2\n ProxyCommand ssh -F {ssh_hosts.config} -W %h:%p node1\nHost node3\n ProxyCommand echo no way >&2"
    )
    pool = _with(extra, ssh_hosts, tmp_path, text)
    assert _came_from(pool, "node2") == ssh_hosts["node1"].address
    with pytest.raises(HostUnreachable, match=r"^node3: .*the SSH handshake fails: ProxyCommand printed: no way$"):
        pool.remote("node3").run(["true"])


def test_an_unknown_key_is_refused_with_its_fingerprint_whatever_the_configuration_says(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n UserKnownHostsFile {tmp_path}/known\n StrictHostKeyChecking no")
    said = subprocess.run(
        ["ssh-keygen", "-lf", ssh_hosts["node1"].own / "host_key.pub"], capture_output=True, text=True, check=True
    ).stdout
    with pytest.raises(HostKeyRefused) as error:
        pool.remote("node1").run(["true"])
    assert said.split()[1] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("port", [22, 2222])
def test_the_line_that_accepts_a_key_works(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path, port: int) -> None:
    pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n UserKnownHostsFile {tmp_path}/known")
    host = Host(name="node1", port=port)
    with pytest.raises(HostKeyRefused, match=r"its host key is not known") as error:
        pool.remote(host).run(["true"])
    subprocess.run(["sh", "-c", str(error.value).partition("if that is right: ")[2]], check=True)
    assert pool.remote(host).run(["true"]).status == 0


def test_a_changed_key_is_refused_and_the_lines_that_are_shown_mend_it(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    before = ssh_hosts.known_hosts.read_text()
    ssh_hosts.new_host_key("node1")
    known = tmp_path / "known"
    known.write_text(before)
    pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n UserKnownHostsFile {known}")
    with pytest.raises(HostKeyRefused, match=r"^node1: ITS HOST KEY HAS CHANGED: .*known:1 says otherwise") as error:
        pool.remote("node1").run(["true"])
    command = str(error.value).partition("installed anew: ")[2]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert pool.remote("node1").run(["true"]).status == 0
    assert pool.remote("node2").run(["true"]).status == 0


def test_a_revoked_key_is_refused(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    known = tmp_path / "known"
    key = " ".join((ssh_hosts["node1"].own / "host_key.pub").read_text().split()[:2])
    known.write_text(f"@revoked * {key}\n{ssh_hosts.known_hosts.read_text()}")
    pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n UserKnownHostsFile {known}")
    with pytest.raises(HostKeyRefused, match=r"^node1: its host key, .*, is revoked \(.*known:1\)$"):
        pool.remote("node1").run(["true"])


def test_a_key_that_a_file_of_revoked_keys_names_is_refused(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    public = ssh_hosts["node1"].own / "host_key.pub"
    lines, krl, odd, nowhere = (tmp_path / name for name in ("lines", "krl", "odd", "nowhere"))
    lines.write_text(f"# found out\n\n{public.read_text()}")
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", krl, public], check=True)
    odd.write_text("oops\n")
    unclear = "may be revoked: RevokedHostKeys names {}, which cannot be used ({})"
    for file, said in (
        (lines, f"is revoked ({lines}:3)"),
        (krl, f"is revoked ({krl})"),
        (odd, unclear.format(odd, "its line 1 is no public key")),
        (nowhere, unclear.format(nowhere, "no such file or directory")),
    ):
        pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n RevokedHostKeys {file}")
        with pytest.raises(HostKeyRefused) as error:
            pool.remote("node1").run(["true"])
        assert str(error.value).startswith("node1: its host key, ssh-ed25519 SHA256:")
        assert str(error.value).endswith(said)
        if file in (lines, krl):
            assert pool.remote("node2").run(["true"]).status == 0


def test_an_authority_s_key_is_named_and_does_not_make_a_host_known(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path
) -> None:
    known = tmp_path / "known"
    known.write_text(f"@cert-authority * {(ssh_hosts['node2'].own / 'host_key.pub').read_text()}")
    pool = _with(extra, ssh_hosts, tmp_path, f"Host *\n UserKnownHostsFile {known}")
    with pytest.raises(HostKeyRefused) as error:
        pool.remote("node1").run(["true"])
    said = f"node1: its host key is not known (accel does not check certificates of the authority in {known}:1): "
    assert str(error.value).startswith(said)


def test_a_key_alias_is_what_is_looked_up(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    key = " ".join((ssh_hosts["node1"].own / "host_key.pub").read_text().split()[:2])
    known = tmp_path / "known"
    known.write_text(f"the-pool {key}\n")
    text = f"Host node1 node2\n UserKnownHostsFile {known}\n HostKeyAlias the-pool"
    pool = _with(extra, ssh_hosts, tmp_path, text)
    assert pool.remote("node1").run(["true"]).status == 0
    with pytest.raises(HostKeyRefused, match="CHANGED"):
        pool.remote("node2").run(["true"])


def test_a_user_who_is_not_let_in(pool: Pool, ssh_hosts: SshHosts) -> None:
    with pytest.raises(LoginRefused) as error:
        pool.remote(Host(name="node1", user="nobody-there")).run(["true"])
    assert str(error.value) == (
        f"node1: does not let nobody-there in; tried {ssh_hosts.identity}; "
        "check the user, or ssh-copy-id nobody-there@node1"
    )


def _key(path: Path, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path], check=True)
    return path


def test_a_key_with_a_passphrase_is_said_and_works_through_the_agent(
    ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    locked.write_bytes(ssh_hosts.identity.read_bytes())
    locked.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True, capture_output=True)
    text = f"Host *\n IdentityFile {locked}\n"
    rest = "\n".join(line for line in ssh_hosts.config.read_text().splitlines() if "IdentityFile" not in line)
    file = tmp_path / "config"
    file.write_text(text + rest)
    with Pool(config=str(file)) as pool, pytest.raises(LoginRefused) as error:
        pool.remote("node1").run(["true"])
    assert f"no key to log in as root; {locked} needs its passphrase: ssh-add {locked};" in str(error.value)

    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        env = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        _key(tmp_path / "other")
        for key in (tmp_path / "other", ssh_hosts.identity):
            subprocess.run(["ssh-add", "-q", key], env=env, check=True)
        subprocess.run(["sh", "-c", f"ssh-keygen -y -f {ssh_hosts.identity} > {locked}.pub"], check=True)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        with Pool(config=str(file)) as pool:
            # The agent signs, and is not taken along.
            assert pool.remote("node1").run(["sh", "-c", "echo ${SSH_AUTH_SOCK-none}"]).stdout == b"none\n"
        for line, said in (("none", "needs its passphrase"), (f"{tmp_path}/nothing", "nothing does not answer")):
            file.write_text(f"Host *\n IdentityAgent {line}\n{text}{rest}")
            with Pool(config=str(file)) as pool, pytest.raises(LoginRefused, match=said):
                pool.remote("node1").run(["true"])
    finally:
        agent.terminate()
        agent.wait()


def test_a_file_that_is_no_key_is_said(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.write_text("hello")
    _with(extra, ssh_hosts, tmp_path, f"Host *\n IdentityFile {odd}\n CertificateFile {odd}.cert")
    assert extra[0].remote("node1").run(["true"]).status == 0  # the next one opens
    with pytest.raises(LoginRefused, match=r"odd is not a usable private key") as error:
        extra[0].remote(Host(name="node1", user="nobody-there")).run(["true"])
    assert f"{odd}.cert is not used: a certificate must be next to its key (KEY-cert.pub)" in str(error.value)


def test_a_port_where_nothing_listens_and_one_where_something_else_does(pool: Pool, ssh_hosts: SshHosts) -> None:
    with pytest.raises(HostUnreachable, match=r"^node1: 10.*:1: connection refused$"):
        pool.remote(Host(name="node1", port=1)).run(["true"])
    code = "import socket, time; s = socket.create_server(('', 8022)); c, _ = s.accept(); c.sendall(b'hello\\n' * 200)"
    with subprocess.Popen(ssh_hosts["node1"].argv("python3", "-c", f"{code}; time.sleep(60)")) as other:
        try:
            listening = "ss -ltn | grep -q :8022"
            wait_until(
                "the other server",
                lambda: subprocess.run(ssh_hosts["node1"].argv("sh", "-c", listening)).returncode == 0,
            )
            with pytest.raises(HostUnreachable, match=r"8022 answers, but the SSH handshake fails"):
                pool.remote(Host(name="node1", port=8022)).run(["true"])
        finally:
            other.kill()


def test_a_host_that_is_cut_off_is_noticed_by_those_that_wait(ssh_hosts: SshHosts, impatient: Pool) -> None:
    with impatient.remote("node1").open(["sleep", "60"]) as session:
        ssh_hosts["node1"].link(False)
        with pytest.raises(HostUnreachable, match=r"^node1: lost while sleep was running: no answer for [0-9]+ s$"):
            session.finish(120)  # its own timeout would be another error
    ssh_hosts["node1"].link(True)
    assert impatient.remote("node1").run(["echo", "again"]).stdout == b"again\n"


def test_a_host_that_is_cut_off_while_it_is_sent_something(ssh_hosts: SshHosts, impatient: Pool) -> None:
    def chunks() -> Iterator[bytes]:
        for number in range(10_000):
            if number == 3:
                ssh_hosts["node1"].link(False)
            yield b"x" * 100_000

    with pytest.raises(HostUnreachable, match=r"no answer for"):
        impatient.remote("node1").run(["cat"], stdin=chunks())


def test_a_silent_command_on_a_live_host_is_not_given_up(impatient: Pool) -> None:
    assert impatient.remote("node2").run(["sh", "-c", "sleep 2.5; echo there"]).stdout == b"there\n"


def test_a_host_that_is_off_is_given_up_in_time(ssh_hosts: SshHosts, extra: list[Pool], tmp_path: Path) -> None:
    ssh_hosts["node2"].kill()
    pool = _with(extra, ssh_hosts, tmp_path, "Host *\n ConnectTimeout 1")
    with pytest.raises(HostUnreachable, match=r"^node2: no answer from 10.*:22 within 1 s$|: no route to host$"):
        pool.remote("node2").run(["true"])


@pytest.mark.parametrize("how", ["session", "power"])
def test_a_server_that_dies_under_a_command(ssh_hosts: SshHosts, pool: Pool, how: str) -> None:
    with pool.remote("node3").open(["sh", "-c", "echo on; exec sleep 60"]) as session:
        assert session.read_line(10) == b"on\n"
        if how == "session":
            ssh_hosts.end_sessions("node3")
        else:
            ssh_hosts["node3"].crash()
        with pytest.raises(HostUnreachable, match=r"^node3: lost while sh was running: "):
            session.finish(30)


def test_a_listener_that_dies_takes_no_session_with_it(ssh_hosts: SshHosts, pool: Pool) -> None:
    pool.remote("node3").run(["true"])
    ssh_hosts.end_sshd("node3")
    assert pool.remote("node3").run(["echo", "still"]).stdout == b"still\n"
