"""The server in a container: it is PID 1, its home is a volume, and clients on other computers reach it over TLS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import schedulers
from schedulers.config.servers import Server, add_server
from schedulers.errors import Unreachable
from schedulers.job import Reason, State
from schedulers.service.client import Client
from tests.clusters.docker import HOST, Docker
from tests.clusters.fixtures import docker
from tests.clusters.kube.pki import Authority
from tests.ports import free_port
from tests.waiting import until

from .conftest import ROOT

__all__ = ["docker"]

HOME = "/accel"
PORT = "8765"
_STATES = "for each in /proc/[0-9]*; do sed -n s/^State:.//p $each/status; done"


@dataclass(frozen=True)
class Container:
    """The server's address, and what `docker run` needs for it."""

    docker: Docker
    url: str
    options: tuple[str, ...]
    command: tuple[str, ...]

    def run(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the server in a container of that name."""
        return subprocess.run(
            ["docker", "run", "--name", name, *options, *self.options, HOST, *self.command],
            env={**os.environ, **self.docker.env}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def is_ready(self) -> bool:
        try:
            return bool(Client(Server(name="team", url=self.url, token="")).get("/info", attempts=1))
        except Unreachable:
            return False


@pytest.fixture
def container(docker: Docker, tmp_path: Path, homes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    """A server in the container `server`, which this process trusts and is logged in to as `team`."""
    authority = Authority(tmp_path / "pki")
    authority.create()
    certificate, key = authority.issue("server", addresses=[docker.address])
    published = free_port()
    url = f"https://{docker.address}:{published}"
    volumes = [f"{ROOT / package}:{ROOT / package}:ro" for package in ("accel", "schedulers")]
    volumes += [f"{authority.directory}:/pki:ro", f"{tmp_path / 'volume'}:{HOME}"]
    options = [*(word for volume in volumes for word in ("-v", volume)), "-e", f"ACCEL_HOME={HOME}"]
    addresses = ["--host", "0.0.0.0", "--port", PORT, "--url", url]
    tls = ["--tls-cert", f"/pki/{certificate.name}", "--tls-key", f"/pki/{key.name}"]
    container = Container(
        docker, url, (*options, "-e", f"PYTHONPATH={ROOT}"), ("python3", "-m", "accel", "serve", *addresses, *tls)
    )
    started = container.run("server", "--detach", "--publish", f"{published}:{PORT}")
    assert started.returncode == 0, started.stderr
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    until(container.is_ready, "the server answers")
    token = (tmp_path / "volume/service/owner-token").read_text().strip()
    add_server(Server(name="team", url=url, token=token))
    yield container
    docker.clear()


def test_a_server_in_a_container(container: Container, tmp_path: Path) -> None:
    docker = container.docker
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import sys, time; print('hi', flush=True); time.sleep(float(sys.argv[1]))\n")

    done = schedulers.submit("train.py", ("0",), target="team/local", cwd=project)
    assert [line.text for line in done.logs(follow=True)] == ["hi\n"]
    assert done.wait().state is State.SUCCEEDED

    def only_the_server() -> bool:
        states = docker.run("exec", "server", "sh", "-c", _STATES).splitlines()
        return len(states) == 3 and "Z (zombie)" not in states  # PID 1, the server below it, and this shell

    until(only_the_server, "the job's supervisor was reaped")

    running = schedulers.submit("train.py", ("600",), target="team/local", cwd=project)
    until(lambda: running.status().state is State.RUNNING, "the job runs")
    second = container.run("second")
    assert second.returncode == 2
    assert "accel serve: another accel serve (process " in second.stderr, second.stderr
    assert f"has the home {HOME}/service: give another --home" in second.stderr

    docker.run("stop", "--time", "60", "server")
    assert docker.run("inspect", "--format", "{{.State.ExitCode}}", "server").strip() == "143"  # not killed: SIGTERM
    docker.run("start", "server")
    until(container.is_ready, "the server answers")
    lost = running.wait()
    assert (lost.state, lost.reason) == (State.FAILED, Reason.LOST)  # all processes of a container end with it
    assert [line.text for line in running.logs()] == ["hi\n"]
    again = schedulers.submit("train.py", ("0",), target="team/local", cwd=project)
    assert again.wait().state is State.SUCCEEDED
