"""`accel serve` as a process, and the commands that log in to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from accel.cli import main
from schedulers.config.servers import Server, Servers, add_server, checked_url, read_servers
from schedulers.errors import ConfigError, CredentialsExpired, Unreachable
from schedulers.service.client import Client, RequestRefused
from tests.clusters.kube.pki import Authority
from tests.schedulers.kubernetes.servers import proxying

from .conftest import RunningServer

Start = Callable[..., RunningServer]


def test_a_first_user(serve: Start, homes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Start it, log in with the printed command, make a token, use that, and log out."""
    server = serve()
    assert server.first_lines[0].endswith("; targets: local\n")
    command = server.first_lines[1].partition("accel login ")[2].split()
    assert main(["login", *command, "--name", "team"]) == 0
    err = capsys.readouterr().err
    assert "accel: logged in to team as " in err
    assert "(owner); targets: team/local" in err
    file = homes / "config/servers.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(file.read_text())["current"] == "team"
    assert main(["token", "create", "--expires", "30d", "--json"]) == 0
    created = json.loads(capsys.readouterr().out)
    assert main(["context"]) == 0
    assert capsys.readouterr().out.split("\t") == ["team", server.url, created["user"], "current\n"]
    assert main(["token", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {token["id"] for token in listed} >= {created["id"]}
    (homes / "token").write_text(created["token"])
    assert main(["login", server.url, "--token-file", str(homes / "token"), "--name", "team"]) == 0
    assert main(["logout"]) == 0
    assert "logged out of team" in capsys.readouterr().err
    assert read_servers().by_name == {}
    with pytest.raises(CredentialsExpired, match=f"team: the token was revoked: accel login {server.url}"):
        Client(Server(name="team", url=server.url, token=created["token"])).get("/me")
    assert server.stop() == ""


def test_tls_and_a_proxy_on_the_way(serve: Start, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(homes / "pki")
    authority.create()
    certificate, key = authority.issue("server", addresses=["127.0.0.1"])
    server = Server(name="team", url=serve("--tls-cert", str(certificate), "--tls-key", str(key)).url, token="")

    def info() -> None:
        assert Client(server).get("/info", attempts=1)["version"]

    with pytest.raises(Unreachable, match=r"team does not answer \(TLS: .*certificate verify failed"):
        info()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    info()
    with proxying(user="ada:p@ss") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("http://", "ada:p%40ss@"))
        info()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        info()
        assert proxy.connected == [server.url.removeprefix("https://")]
    monkeypatch.delenv("NO_PROXY")
    with pytest.raises(Unreachable, match=r"team does not answer \(the proxy in HTTPS_PROXY: connection refused\)"):
        info()
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(ConfigError, match="the variable HTTPS_PROXY must be http://HOST:PORT or https://HOST:PORT"):
        info()


def test_the_end_does_not_wait_for_connections(serve: Start) -> None:
    server = serve()
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(5)]
    idle[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert idle[0].recv(4096).startswith(b"HTTP/1.1 200")
    started = time.monotonic()
    server.stop(signal.SIGTERM)
    assert time.monotonic() - started < 5
    assert server.process.returncode in (0, -signal.SIGTERM)
    for connection in idle:
        connection.close()


def test_the_end_does_not_wait_for_a_target(serve: Start, homes: Path) -> None:
    """A request waits for an API server that is silent when SIGTERM comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = {"cluster": {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}, "name": "c"}
        context = {"context": {"cluster": "c", "user": "u"}, "name": "c"}
        users = [{"name": "u", "user": {}}]
        document = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"}
        (homes / "kubeconfig").write_text(yaml.safe_dump(document))
        target = {"kind": "kubernetes", "image": "train", "kubeconfig": str(homes / "kubeconfig")}
        (homes / "config/accel.yaml").write_text(yaml.safe_dump({"targets": {"lab": target}}))
        server = serve()
        assert server.first_lines[0].endswith(f"; targets: lab, local ({homes}/config/accel.yaml)\n")
        token = (homes / "home/service/owner-token").read_text().strip()
        body = {"spec": {"argv": ["train.py"]}, "target": "lab"}
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            text = json.dumps(body).encode()
            lines = (
                "PUT /api/v1/jobs/2nfk2a1g7y0?dry_run=true HTTP/1.1", "Host: localhost", f"Content-Length: {len(text)}",
                "Content-Type: application/json", f"Authorization: Bearer {token}", "", "",
            )  # fmt: skip
            client.sendall("\r\n".join(lines).encode() + text)
            connection, _ = silent.accept()
            started = time.monotonic()
            server.stop(signal.SIGTERM, seconds=30)
            assert time.monotonic() - started < 5
            connection.close()
        assert server.process.returncode in (0, -signal.SIGTERM)


def test_what_keeps_it_from_starting(serve: Start, homes: Path) -> None:
    server = serve()
    port = server.url.rpartition(":")[2]

    def fails(*arguments: str) -> str:
        command = [sys.executable, "-m", "accel", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=homes)
        assert done.returncode == 2, done
        return done.stderr

    home = homes / "home/service"
    holder = f"process {server.process.pid} on {socket.gethostname()}"
    assert fails("--port", "0") == (
        f"accel serve: another accel serve ({holder}) has the home {home}: give another --home\n"
    )
    taken = fails("--port", port, "--home", str(homes / "other"))
    assert taken == f"accel serve: port {port} of 127.0.0.1 is taken: give another --port\n"
    (homes / "config/serve.yaml").write_text("prot: 1\n")
    assert "config/serve.yaml:1: unknown key 'prot'; did you mean 'port'?" in fails()
    assert "--sql is for migrate" in fails("--sql")


def test_check_and_migrate(homes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (homes / "config/accel.yaml").write_text("targets: {far: {kind: ssh, hosts: [nowhere.invalid]}}\n")
        arguments = ["serve", "check", "--json", "--port", str(port)]
        assert main(arguments) == 1
    rows = {row["part"]: (row["ok"], row["detail"]) for row in json.loads(capsys.readouterr().out)}
    assert rows[f"home {homes / 'home/service'}"] == (True, "")
    assert rows["database"] == (True, "a start creates or migrates its tables (sqlite)")
    assert "users" not in rows  # there are none yet
    assert rows[f"address http://127.0.0.1:{port}"] == (
        False, f"port {port} of 127.0.0.1 is taken: give another --port",
    )  # fmt: skip
    assert rows["target local"][0]
    assert not rows["target far"][0]
    with monkeypatch.context() as network:
        network.setattr("schedulers.local.job_files.DISKS", set())
        assert main([*arguments, "--tls-cert", "no.pem", "--tls-key", "no.key"]) == 1
    rows = {row["part"]: (row["ok"], row["detail"]) for row in json.loads(capsys.readouterr().out)}
    assert rows["TLS"][0] is False
    assert rows["TLS"][1].endswith("no.key: No such file or directory")
    assert rows["database"][0] is False
    assert "service.db is on a network file system, where SQLite loses data" in rows["database"][1]
    assert "users" not in rows
    assert main(["serve", "migrate"]) == 0
    assert "the database has revision 0001 (before: none)" in capsys.readouterr().err
    assert main(["serve", "migrate"]) == 0
    assert "the database has revision 0001 already" in capsys.readouterr().err
    assert main(["serve", "migrate", "--sql"]) == 0
    assert "CREATE TABLE job" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("jobs.example.org", "'jobs.example.org' is not the URL of a server, such as https://jobs.example.org"),
        ("http://jobs.example.org", "a token is sent over https only: use https://jobs.example.org"),
        ("http://10.0.0.1:8765", "a token is sent over https only: use https://10.0.0.1:8765"),
        ("https://ada:secret@x", "is not the URL of a server"),
    ],
)
def test_where_no_token_is_sent(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_url(url)


def test_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str], homes: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(Unreachable, match=r"team does not answer \(connection refused\)"):
        Client(Server(name="team", url=f"http://127.0.0.1:{port}", token="x")).get("/me")
    with pytest.raises(Unreachable, match=r"team does not answer \(.*resol|name or service"):
        Client(Server(name="team", url="https://nowhere.invalid", token="x")).get("/me")


def test_a_token_does_not_follow_a_redirect() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        client = Client(Server(name="team", url=f"http://127.0.0.1:{first.getsockname()[1]}", token="secret"))
        reply = pool.submit(client.get, "/me")
        connection, _ = first.accept()
        with connection:
            assert b"Authorization: Bearer secret" in connection.recv(4096)
            location = f"http://127.0.0.1:{second.getsockname()[1]}/api/v1/me"
            connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
        with pytest.raises(Unreachable, match=r"is not accel serve \(status 302\)"):
            reply.result(30)
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.accept()


def test_a_server_is_forgotten(homes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("team", "other"):
        add_server(Server(name=name, url=f"https://{name}.example.org", token="x"))
    assert main(["context", "remove", "team"]) == 0
    assert "removed team" in capsys.readouterr().err
    assert list(read_servers().by_name) == ["other"]
    assert main(["context", "remove", "team"]) == 2


def test_a_refusal_has_the_servers_words(serve: Start, homes: Path) -> None:
    server = serve()
    token = (homes / "home/service/owner-token").read_text().strip()
    client = Client(Server(name="team", url=server.url, token=token))
    with pytest.raises(RequestRefused, match=r"^team: body: unknown key 'dayz'$"):
        client.request("POST", "/tokens", document={"dayz": 1})
    with pytest.raises(RequestRefused, match=r"^team: the body has more than"):
        client.request("POST", "/tokens", data=b"x" * 2_000_000)


def test_the_environment_names_a_server(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SERVER", "https://ci.example.org/")
    monkeypatch.setenv("ACCEL_TOKEN", "secret")
    server = Server(name="server", url="https://ci.example.org", token="secret")
    assert read_servers() == Servers(by_name={"server": server})
    assert "secret" not in repr(server)
    # It is never written to the file.
    monkeypatch.setattr("sys.argv", ["accel"])
    assert main(["context", "use", "server"]) == 2
    assert not (homes / "config/servers.yaml").exists()


def test_mistakes_of_the_commands(homes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "no server 'team' (servers: none); log in to one: accel login URL" in fails("context", "use", "team")
    assert "--token-file nowhere: No such file or directory" in fails("login", "https://x", "--token-file", "nowhere")
    assert "give one ID with revoke" in fails("token", "revoke")
    assert "--user, --role and --expires require create" in fails("token", "list", "--user", "a")
    (homes / "config/servers.yaml").write_text("servers:\n  team: {token: x}\n")
    assert "servers.yaml:2: server team: expects url, token and user" in fails("context")
