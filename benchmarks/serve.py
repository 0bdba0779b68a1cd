"""Benchmarks of `accel serve`: a submit and a list through a server, pages of jobs, followers of a log, idling.

Server, client and jobs run on this computer. The server has a local target, and is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from .measure import WAIT_S, Bar, interleaved, report, wall

ACCEL = str(Path(sys.executable).parent / "accel")
_LIVE, _ROWS, _PAGE = 50, 10_000, 100
_FOLLOWERS, _LINES_PER_S, _FOLLOW_S, _IDLE_S = 100, 640, 10.0, 20.0
_REQUESTS = 20  # for one figure of a page


@dataclass(frozen=True)
class Lab:
    """A server, and the environment of a client that has logged in to it as `team`."""

    server: psutil.Process
    url: str
    home: Path
    folder: Path
    env: Mapping[str, str]

    def accel(self, *words: str) -> str:
        """Run the client; return its output."""
        done = subprocess.run([ACCEL, *words], env=self.env, cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"accel {' '.join(words)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    @property
    def token(self) -> str:
        """The owner's token."""
        return (self.home / "owner-token").read_text().strip()

    def direct(self) -> dict[str, str]:
        """The environment of a client that works on the server's own jobs."""
        return {**self.env, "ACCEL_HOME": str(self.home)}


@contextlib.contextmanager
def lab(targets: str = "{}", rows: int = 0) -> Iterator[Lab]:
    """Start a server, with `rows` finished jobs in its database, and log a client in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config").mkdir()
        (folder / "config/accel.yaml").write_text(f"targets: {targets}\n")
        (folder / "config/serve.yaml").write_text(f"streams: {2 * _FOLLOWERS}\n")  # all are of one user
        (folder / "train.py").write_text("print('trained')\n")
        env = {**os.environ, "ACCEL_CONFIG_HOME": str(folder / "config"), "ACCEL_HOME": str(folder / "home")}
        home = folder / "home/service"
        if rows:
            _fill(env, home, rows)
        command = [ACCEL, "serve", "--port", "0"]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2].rstrip(",")
            process.stdout.readline()
            server_lab = Lab(psutil.Process(process.pid), url, home, folder, env)
            server_lab.accel("login", url, "--token-file", str(home / "owner-token"), "--name", "team")
            yield server_lab
        finally:
            process.terminate()
            process.wait(WAIT_S)
            _cancel_all(home)


def serve_submit(rounds: int) -> bool:
    """A submit through the server and one without it, each a new process: at most a fifth more."""
    with lab() as server_lab:
        through = [ACCEL, "submit", "--target", "team/local", "train.py"]
        direct = [ACCEL, "submit", "--target", "local", "train.py"]
        cwd = str(server_lab.folder)
        measures = {
            "accel submit": _then_wait(server_lab, wall(direct, server_lab.env, cwd)),
            "accel submit, through the server": _then_wait(server_lab, wall(through, server_lab.env, cwd)),
        }
        bars = [Bar(ours="accel submit, through the server", base="accel submit", limit=1.2)]
        return report("serve_submit", interleaved(measures, rounds), bars)


def _then_wait(server_lab: Lab, measure: Callable[[], float]) -> Callable[[], float]:
    """The measure, and then the end of the job, which would disturb the next one."""

    def measured() -> float:
        seconds = measure()
        server_lab.accel("wait", "@last")
        return seconds

    return measured


def serve_list(rounds: int) -> bool:
    """A list of 50 live jobs through the server, and of the same jobs where the server runs: at most twice."""
    with lab("{lab: {kind: local, concurrency: 1}}") as server_lab:
        words = ("submit", "--target", "team/lab", "--no-python", "sleep", "3600")
        ids = [server_lab.accel(*words).split()[-1] for _ in range(_LIVE)]
        _until(lambda: server_lab.accel("list", "--all").count("queued") == _LIVE - 1)
        measures = {
            f"accel list, {_LIVE} live jobs": wall([ACCEL, "list"], server_lab.direct(), str(server_lab.folder)),
            f"accel list, {_LIVE} live jobs of the server": wall(
                [ACCEL, "list"], server_lab.env, str(server_lab.folder)
            ),
        }
        seconds = interleaved(measures, rounds)
        server_lab.accel("cancel", *ids)
        ours, base = f"accel list, {_LIVE} live jobs of the server", f"accel list, {_LIVE} live jobs"
        return report("serve_list", seconds, [Bar(ours=ours, base=base, limit=2)])


def serve_pages(rounds: int) -> bool:
    """A page of 100 jobs: of 100 and of 10,000, the newest ones and those after 9,000."""
    with lab(rows=_PAGE) as few, lab(rows=_ROWS) as many:
        measures = {
            f"page of {_PAGE} jobs": _pages(few, 0),
            f"page of {_ROWS} jobs": _pages(many, 0),
            f"page of {_ROWS} jobs, after 9,000": _pages(many, 9_000),
        }
        bars = [
            Bar(ours=f"page of {_ROWS} jobs", base=f"page of {_PAGE} jobs", limit=2),
            Bar(ours=f"page of {_ROWS} jobs, after 9,000", base=f"page of {_ROWS} jobs", limit=1.5),
        ]
        return report("serve_pages", interleaved(measures, rounds), bars)


def _pages(server_lab: Lab, depth: int) -> Callable[[], float]:
    """The seconds of one request of several on one connection, for the page after `depth` jobs."""
    from schedulers.config.servers import Server
    from schedulers.service.client import Client

    client = Client(Server(name="team", url=server_lab.url, token=server_lab.token))
    query: dict[str, object] = {"limit": 1000}
    for _ in range(depth // 1000):
        query["before"] = client.get("/jobs", query)["jobs"][-1]["id"]
    query["limit"] = _PAGE

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(_REQUESTS):
            assert len(client.get("/jobs", query)["jobs"]) == _PAGE
        return (time.perf_counter() - started) / _REQUESTS

    return measure


def serve_followers(rounds: int) -> bool:
    """Compare the server's processor time for 100 followers and for one, at 640 lines a second: at most 15 ×."""
    with lab() as server_lab:
        (server_lab.folder / "lines.py").write_text(
            "import time\nbegan = time.monotonic()\nfor n in range(10**9):\n    print(f'{n:099d}', flush=True)\n"
            f"    time.sleep(max(0.0, began + (n + 1) / {_LINES_PER_S} - time.monotonic()))\n"
        )
        job = server_lab.accel("submit", "--target", "team/local", "lines.py").split()[-1]
        _until(lambda: "running" in server_lab.accel("status", job))
        memory: list[float] = []

        def follow(count: int) -> float:
            before, rss = sum(server_lab.server.cpu_times()[:2]), server_lab.server.memory_info().rss
            lines = asyncio.run(_follow(server_lab, job, count))
            assert min(lines) >= _LINES_PER_S * _FOLLOW_S / 2, f"a follower got {min(lines)} lines"
            memory.append((server_lab.server.memory_info().rss - rss) / 1e3)
            return sum(server_lab.server.cpu_times()[:2]) - before

        names = {1: "CPU with one follower", _FOLLOWERS: f"CPU with {_FOLLOWERS} followers"}
        seconds = interleaved({name: lambda count=count: follow(count) for count, name in names.items()}, rounds)  # type: ignore[misc]
        server_lab.accel("cancel", job)
        grown = f"memory that {_FOLLOWERS} followers add, kB"
        seconds |= {grown: [max(memory)] * rounds, "32 MB in kB": [32e3] * rounds}
        bars = [Bar(ours=names[_FOLLOWERS], base=names[1], limit=15), Bar(ours=grown, base="32 MB in kB", limit=1)]
        return report("serve_followers", seconds, bars)


async def _follow(server_lab: Lab, job: str, count: int) -> list[int]:
    """Follow the log for `_FOLLOW_S` seconds with `count` clients; return the number of lines that each gets."""
    from schedulers.config.servers import Server
    from schedulers.service.client import Client

    client = Client(Server(name="team", url=server_lab.url, token=server_lab.token))
    headers = client.request("GET", f"/jobs/{job}/logs", query={"tail": 0, "limit_bytes": 0}).headers
    address = urlsplit(server_lab.url)
    request = (
        f"GET /api/v1/jobs/{job}/logs/stream?since={headers['Accel-Offset']} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: Bearer {server_lab.token}\r\n\r\n"
    ).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(request)
        lines, deadline = 0, time.monotonic() + _FOLLOW_S
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            while (left := deadline - time.monotonic()) > 0:
                lines += (await asyncio.wait_for(reader.read(1 << 16), left)).count(b"data:")
        writer.close()
        return lines

    return await asyncio.gather(*(one() for _ in range(count)))


def serve_idle(rounds: int) -> bool:
    """An idle server: at most 1 % of a core, and 130 MB."""
    with lab() as server_lab:
        server_lab.accel("list")

        def cpu() -> float:
            before = sum(server_lab.server.cpu_times()[:2])
            time.sleep(_IDLE_S)
            return (sum(server_lab.server.cpu_times()[:2]) - before) / _IDLE_S

        seconds = interleaved({"CPU of a second": cpu}, rounds)
        seconds["memory, kB"] = [server_lab.server.memory_info().rss / 1e3] * rounds
        seconds |= {"1 % of a core": [0.01] * rounds, "130 MB in kB": [130e3] * rounds}
        bars = [Bar(ours="CPU of a second", base="1 % of a core", limit=1)]
        return report("serve_idle", seconds, [*bars, Bar(ours="memory, kB", base="130 MB in kB", limit=1)])


def _cancel_all(home: Path) -> None:
    """End the jobs that a benchmark which has failed leaves behind."""
    from schedulers.jobs.handle import find, list_jobs
    from schedulers.store.store import Record, Store

    store = Store(home)
    for record in list_jobs(store=store):
        if isinstance(record, Record) and not record.status.state.final:
            find(record.id, store).cancel()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("it did not come true")
        time.sleep(0.5)


def _fill(env: Mapping[str, str], home: Path, count: int) -> None:
    """Create a database with `count` finished jobs."""
    code = (
        "import sys\n"
        "from sqlalchemy import insert\n"
        "from accel.serve.server import open_context\n"
        "from accel.serve.settings import Settings\n"
        "from accel.serve.tables import job\n"
        "row = dict(owner='ada', project='default', name='train.py', target='local', kind='local', nodes=1, gpus=0,\n"
        "    state='succeeded', reason='none', exit_code=0, attempt=0, message='', native_state='', warning='',\n"
        "    created_at=1.0, started_at=2.0, ended_at=3.0, observed_at=3.0, request='{}', sha256='', changed_at=3.0)\n"
        "with open_context(Settings(home=sys.argv[1])) as context, context.database.write() as connection:\n"
        "    rows = [{**row, 'id': context.store.new_id()} for _ in range(int(sys.argv[2]))]\n"
        "    connection.execute(insert(job), rows)\n"
    )
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-c", code, str(home), str(count)], env=env, check=True)
