"""A server in this process, and one as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.needs import package

for _name in ("fastapi", "uvicorn", "sqlalchemy", "alembic", "httpx2"):
    package(_name)

from fastapi.testclient import TestClient  # noqa: E402

from accel.serve import people  # noqa: E402
from accel.serve.app import create_app  # noqa: E402
from accel.serve.context import ServeContext  # noqa: E402
from accel.serve.server import open_context  # noqa: E402
from accel.serve.settings import Settings, read_settings  # noqa: E402

ROOT = Path(__file__).parents[2]
BASE = "http://127.0.0.1:8765"


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `home` and `config` of this user, which the variables name."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("ACCEL_SERVER", "ACCEL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").mkdir()
    return tmp_path


@pytest.fixture
def settings(homes: Path) -> Settings:
    return read_settings(None, {})


@pytest.fixture
def context(settings: Settings) -> Iterator[ServeContext]:
    """A server's context, whose owner is this process's user."""
    with open_context(settings) as context:
        people.start(context)
        yield context


Api = Callable[[str], TestClient]


@pytest.fixture
def api(context: ServeContext) -> Iterator[Api]:
    """Returns a client of the application in this process, with that token."""
    app = create_app(context)
    clients: list[TestClient] = []

    def client(token: str) -> TestClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        clients.append(TestClient(app, base_url=BASE, headers=headers))
        return clients[-1]

    yield client
    for opened in clients:
        opened.close()


@pytest.fixture
def owner(api: Api, settings: Settings) -> TestClient:
    return api((Path(settings.home) / people.TOKEN_FILE).read_text().strip())


@dataclass
class RunningServer:
    """A process of `accel serve`."""

    process: subprocess.Popen[str]
    url: str
    first_lines: list[str]

    def stop(self, signum: int = signal.SIGTERM, seconds: float = 10) -> str:
        """End it, and return what else it printed."""
        self.process.send_signal(signum)
        return self.process.communicate(timeout=seconds)[0]


def start_server(directory: Path, env: Mapping[str, str], *arguments: str) -> RunningServer:
    """Start `accel serve` with these arguments, on a free port unless they name one."""
    command = [sys.executable, "-m", "accel", "serve", *(() if "--port" in arguments else ("--port", "0")), *arguments]
    process = subprocess.Popen(
        command, cwd=directory, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    match = re.search(r"https?://\S+?(?=,)", lines[0])
    assert match is not None, lines[0] + process.communicate(timeout=60)[0]
    return RunningServer(process, match[0], lines)


def _end(server: RunningServer) -> None:
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()
    elif server.process.stdout is not None:
        server.process.stdout.close()


@pytest.fixture
def serve(homes: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts `accel serve` with these arguments, on a free port unless they name one."""
    servers: list[RunningServer] = []

    def start(*arguments: str) -> RunningServer:
        servers.append(start_server(homes, os.environ, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        _end(server)


@dataclass(frozen=True)
class Team:
    """A server with the targets `local` and `small`, which other tests use too, and its owner's token."""

    url: str
    home: Path
    token: str

    def log_in(self, config: Path) -> None:
        """Make it the server `team` of a configuration directory, and its target `local` the current one."""
        entry = {"url": self.url, "token": self.token, "user": "ada"}
        config.mkdir(parents=True, exist_ok=True)
        (config / "servers.yaml").write_text(json.dumps({"current": "team/local", "servers": {"team": entry}}))


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """One server for all tests that need no other."""
    directory = tmp_path_factory.mktemp("team")
    (directory / "accel.yaml").write_text("targets: {small: {kind: local, concurrency: 1}}\n")
    env = os.environ | {"ACCEL_HOME": str(directory), "ACCEL_CONFIG_HOME": str(directory), "PYTHONPATH": str(ROOT)}
    server = start_server(directory, env, "--home", str(directory / "service"))
    yield Team(server.url, directory / "service", (directory / "service" / people.TOKEN_FILE).read_text().strip())
    _end(server)
