"""Logs of jobs by offset, as events and as a file: no line is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import gzip
import http.client
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import sse
from fastapi.testclient import TestClient
from sqlalchemy import insert

from accel.serve import people, spool_file
from accel.serve.app import create_app
from accel.serve.auth import create_token
from accel.serve.context import ServeContext
from accel.serve.logs import _read
from accel.serve.server import open_context
from accel.serve.settings import read_settings
from accel.serve.spool import Spools
from accel.serve.tables import job as job_table
from schedulers.errors import SubmitError, Unreachable
from schedulers.job import Cursor, JobSpec, LogLine
from schedulers.jobs.handle import Job, submit_spec
from schedulers.local.target import LocalTarget
from schedulers.store.store import Store
from schedulers.target import Plan
from tests.marks import long
from tests.waiting import until

from .conftest import BASE
from .test_server import Start

# Prints 40 lines of each rank, one of them not UTF-8, and a last one without an ending.
TWO_RANKS = r"""
import os, sys
rank = os.environ["RANK"]
for number in range(40):
    print(f"{rank} line {number}", flush=True)
sys.stdout.buffer.write(b"\xff\xfe caf\xc3\xa9\n" + b"x" * 300 + b"\nlast of " + rank.encode())
"""

# Prints 20,000 numbered lines, as many for each of PARTS files `go-N`, and then runs to be cancelled.
NUMBERED = """
import os, time
for number in range(20_000):
    while not os.path.exists(f"go-{number * PARTS // 20_000}"):
        time.sleep(0.02)
    print(f"line {number} " + "y" * 40, flush=number % 50 == 49)
    if number % 50 == 49:
        time.sleep(0.02)
time.sleep(600)
"""


def _submit(store: Store, project: Path, script: str, ranks: int = 1) -> Job:
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text(script)
    return submit_spec(JobSpec(argv=("train.py",), code=str(project), procs_per_node=ranks), "local", store)


def _add_row(context: ServeContext, job_id: str, state: str = "running") -> None:
    """Add the index's row of a job, as its submit does."""
    row: dict[str, Any] = dict.fromkeys(("reason", "message", "native_state", "warning", "request", "sha256"), "")
    row |= {"id": job_id, "owner": "ada", "project": "default", "name": "train", "target": "local", "kind": "local"}
    row |= {"nodes": 1, "gpus": 0, "state": state, "attempt": 0, "created_at": 0, "observed_at": 0, "changed_at": 0}
    with context.database.write() as connection:
        connection.execute(insert(job_table).values(**row))


class World:
    """A server in this process, and a job of two ranks that is over."""

    def __init__(self, context: ServeContext, client: TestClient, job: Job) -> None:
        self.context, self.client, self.job = context, client, job
        self.path = f"/api/v1/jobs/{job.id}/logs"

    def get(self, query: str = "", path: str = "") -> Any:
        answer = self.client.get((path or self.path) + query)
        assert answer.status_code == 200, answer.text
        return answer

    def fails(self, query: str, path: str = "") -> tuple[int, str]:
        answer = self.client.get((path or self.path) + query)
        return answer.status_code, answer.json()["detail"]

    def complete(self) -> bytes:
        """The whole log, which is complete."""
        until(lambda: self.get("?since=0").headers["Accel-Complete"] == "true", "the log is complete")
        content: bytes = self.get().content
        return content


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_HOME", str(path / "home"))
        patch.setenv("ACCEL_CONFIG_HOME", str(path / "config"))
        settings = read_settings(None, {})
        with open_context(settings) as context:
            people.start(context)
            token = (Path(settings.home) / people.TOKEN_FILE).read_text().strip()
            job = _submit(context.store, path / "project", TWO_RANKS, 2)
            _add_row(context, job.id)
            with TestClient(create_app(context), base_url=BASE, headers={"Authorization": f"Bearer {token}"}) as client:
                job.wait(60)
                yield World(context, client, job)
            context.ending.set()


def _lines(content: bytes) -> list[LogLine]:
    """Return the lines of an answer that begins at 0."""
    lines, offset = [], 0
    for raw in content.splitlines(keepends=True):
        offset += len(raw)
        if not spool_file.is_mark(raw):
            lines.append(LogLine.from_json(json.loads(raw), source="log", position=str(offset)))
    return lines


def _plain(lines: list[LogLine] | Iterator[LogLine]) -> list[tuple[int | None, str, bool]]:
    return [(line.rank, line.text, line.partial) for line in lines]


def test_the_log_is_what_the_target_has(world: World) -> None:
    content = world.complete()
    lines = _lines(content)
    assert _plain(lines) == _plain(world.job.logs())
    assert {line.data for line in lines} >= {b"\xff\xfe caf\xc3\xa9\n", b"last of 0", b"last of 1"}
    marks = [json.loads(raw) for raw in content.splitlines() if spool_file.is_mark(raw)]
    assert marks[-1]["complete"] is True
    assert Cursor.parse(marks[-1]["cursor"]) == Cursor.parse(marks[-2]["cursor"])
    assert content.isascii()


def test_every_offset_after_a_line_continues_there(world: World) -> None:
    content, offset, pieces = world.complete(), 0, []
    while True:
        answer = world.get(f"?since={offset}&limit_bytes=150")
        pieces.append(answer.content)
        assert len(pieces[-1]) <= 150 or pieces[-1].count(b"\n") == 1
        offset += len(pieces[-1])
        assert answer.headers["Accel-Offset"] == str(offset)
        assert answer.headers["Accel-More"] == ("true" if offset < len(content) else "false")
        if answer.headers["Accel-Complete"] == "true":
            break
        assert world.get(f"?since={offset}").content == content[offset:]
    assert b"".join(pieces) == content
    assert world.get(f"?since={offset}").content == b""


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_the_last_lines_of_each_rank(world: World, count: int) -> None:
    content = world.complete()
    answer = world.get(f"?tail={count}&limit_bytes=0")
    starts = answer.json()
    lines = [line for line in _lines(content) if int(line.position) > starts[json.dumps(line.rank)]]
    assert _plain(lines) == _plain(world.job.logs(tail=count))
    assert answer.headers["Accel-Offset"] == str(min(starts.values()))
    assert world.get(f"?tail={count}").content == content[min(starts.values()) :]


def test_a_line_in_pieces_counts_once(tmp_path: Path) -> None:
    path, pieces = tmp_path / "log", [("a", True), ("b", False), ("c", False), ("d", True)]
    encoded = [
        spool_file.encode(LogLine(rank=0, text=text, partial=partial, source="", position=""))
        for text, partial in pieces
    ]
    path.write_bytes(b"".join(encoded))
    end, size = path.stat().st_size, len(encoded[0])
    assert spool_file.last_lines(str(path), 0, end, 1) == {"0": end - size - len(encoded[2])}
    assert spool_file.last_lines(str(path), 0, end, 2) == {"0": 0}
    assert spool_file.last_lines(str(path), 0, end, 0) == {"0": end - size}  # what is not finished is not left out


def test_a_time_is_the_first_batch_read_then(world: World) -> None:
    content = world.complete()
    marks = [json.loads(raw) for raw in content.splitlines() if spool_file.is_mark(raw)]
    assert world.get("?at=0&limit_bytes=0").headers["Accel-Offset"] == "0"
    last = world.get(f"?at={marks[-1]['at']}").content
    assert last.startswith(b'{"cursor"') or last == content  # unless all of it was read within a millisecond
    for when in (marks[-1]["at"] + 1, 2**40):
        headers = world.get(f"?at={when}&limit_bytes=0").headers
        assert (headers["Accel-Offset"], headers["Accel-Complete"]) == (str(len(content)), "true")


def test_a_download_has_the_text(world: World) -> None:
    world.complete()
    answer = world.get(".gz")
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.headers["content-disposition"] == f'attachment; filename="{world.job.id}.log.gz"'
    text = gzip.decompress(answer.content)
    assert text.count(b"[rank 0] 0 line ") == text.count(b"[rank 1] 1 line ") == 40
    assert b"[rank 0] \xff\xfe caf\xc3\xa9\n" in text
    assert b"[rank 1] last of 1\n" in text


def _events(text: str) -> list[tuple[list[bytes], str]]:
    """Return the lines of each event, and its id."""
    fields = [event.split("\n") for event in text.split("\n\n")[:-1]]
    return [([x[6:].encode() for x in event if x.startswith("data: ")], event[-1][4:]) for event in fields]


def test_a_stream_has_each_line_once_and_then_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.serve.logs._EVENT_BYTES", 1000)
    content = world.complete()
    text = world.get("/stream").text
    assert text.endswith(f"\n\nevent: end\ndata: {{}}\nid: {len(content)}\n\n")
    events = _events(text)[:-1]
    assert len(events) > 5
    data = [line for lines, _ in events for line in lines]
    assert data == [raw for raw in content.splitlines() if not spool_file.is_mark(raw)]
    again = world.client.get(f"{world.path}/stream?since=0", headers={"Last-Event-ID": events[2][1]}).text
    assert _events(again)[:-1] == events[3:]
    assert world.context.spools.streams.total() == 0


@pytest.mark.parametrize("limit", [1, 100, 1000, 10_000])
def test_the_last_batch_is_read_from_memory_as_from_the_file(world: World, limit: int) -> None:
    content = world.complete()
    spool, _ = world.context.spools.read_soon(world.job.id)
    offsets = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
    expected = [spool_file.read(spool.path, offset, len(content), limit) for offset in offsets]

    async def read(offset: int) -> bytes:
        return await _read(spool, offset, len(content), limit)

    spool.recent = (0, content)
    assert [asyncio.run(read(offset)) for offset in offsets] == expected


def test_mistakes_are_one_line(world: World) -> None:
    size = len(world.complete())
    assert world.fails("?sinse=1") == (422, "query: unknown key 'sinse'")
    assert world.fails("?since=5") == (422, f"no line of this log, which has {size:,} bytes, ends at byte 5")
    assert world.fails("?since=99999999")[0] == 422
    assert world.fails("/stream?since=5")[0] == 422
    assert world.fails("?tail=-1")[0] == 422
    for path in ("logs", "logs/stream", "logs.gz"):
        assert world.fails("", f"/api/v1/jobs/nothing/{path}") == (404, "no job 'nothing'")


def test_a_job_that_never_ran_has_an_empty_log(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(self: LocalTarget, plan: Plan) -> str:
        raise SubmitError("not today")

    monkeypatch.setattr(LocalTarget, "submit", reject)
    with pytest.raises(SubmitError, match="not today"):
        _submit(world.context.store, tmp_path / "project", "")
    rejected, unrecorded = max(world.context.store.ids()), world.context.store.new_id()
    assert rejected != world.job.id
    for job_id in (rejected, unrecorded):
        _add_row(world.context, job_id, "failed")
        path = f"/api/v1/jobs/{job_id}/logs"
        assert world.get("/stream", path).text.startswith("event: end\n")
        answer = world.get("", path)
        assert (answer.headers["Accel-Complete"], _lines(answer.content)) == ("true", [])


def test_a_job_that_is_being_submitted_has_no_lines_yet(world: World) -> None:
    waiting = world.context.store.new_id()
    _add_row(world.context, waiting, "submitting")
    answer = world.get("", f"/api/v1/jobs/{waiting}/logs")
    assert (answer.content, answer.headers["Accel-Complete"], answer.headers["Accel-More"]) == (b"", "false", "false")
    spools = Spools(world.context.store, world.context.home / "other", 1000, threading.Event(), idle_s=0.2)
    first, _ = spools.read_soon(waiting)
    assert spools.read_soon(waiting)[0] is first
    until(lambda: first.ended, "nobody asks for it any more")
    assert spools.read_soon(waiting)[0] is not first


@pytest.fixture
def spools(world: World, tmp_path: Path) -> Callable[[int], Spools]:
    """Reads the same job into a directory of its own, with a limit in bytes."""
    return lambda max_bytes: Spools(world.context.store, tmp_path, max_bytes, world.context.ending)


def _completed(spools: Spools, world: World, tmp_path: Path) -> bytes:
    spools.complete(world.job.id)
    path = tmp_path / f"{world.job.id}.ndjson"
    until(lambda: spool_file.last_mark(str(path)).complete, "the log is complete")
    return path.read_bytes()


def test_a_log_is_cut_at_its_limit(world: World, tmp_path: Path, spools: Callable[[int], Spools]) -> None:
    lines = _lines(_completed(spools(2000), world, tmp_path))
    assert lines[-1].stream == "missing"
    assert lines[-1].text == (
        "accel serve: the log is cut here, at 2.0 KiB: raise max_log in serve.yaml for later jobs\n"
    )
    expected = _plain(world.job.logs())
    assert 10 < len(lines) < len(expected)
    assert _plain(lines[:-1]) == expected[: len(lines) - 1]


def test_more_logs_than_threads_are_completed_in_turn(
    world: World, tmp_path: Path, spools: Callable[[int], Spools], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel.serve.spool._MAX_THREADS", 2)
    reader, jobs = spools(1 << 20), [world.context.store.new_id() for _ in range(5)]
    for job_id in jobs:
        reader.complete(job_id)
    paths = [tmp_path / f"{job_id}.ndjson" for job_id in jobs]
    until(lambda: all(spool_file.last_mark(str(path)).complete for path in paths), "all are complete")


@pytest.mark.parametrize("rest", [b"", b'{"rank":0,"att', b'{"rank":0,"attempt":0}\n{"cursor":"rank-0', b"\0" * 70_000])
def test_what_follows_the_last_mark_is_read_again(
    world: World, tmp_path: Path, spools: Callable[[int], Spools], rest: bytes
) -> None:
    first = _completed(spools(5000), world, tmp_path)
    path = tmp_path / f"{world.job.id}.ndjson"
    cut = first.index(b"\n", first.index(b'{"cursor"')) + 1
    path.write_bytes(first[:cut] + rest)
    again = _completed(spools(1 << 20), world, tmp_path)
    assert again.startswith(first[:cut])
    assert _plain(_lines(again)) == _plain(world.job.logs())


def test_a_full_disk_is_reported_and_the_log_goes_on_later(
    world: World, tmp_path: Path, spools: Callable[[int], Spools], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = os.write, threading.Event()
    full.set()

    def limited(fd: int, data: bytes) -> int:
        if full.is_set() and os.readlink(f"/proc/self/fd/{fd}").endswith(".ndjson"):
            if len(data) < 100:
                raise OSError(28, "No space left on device")
            return write(fd, data[: len(data) // 2])
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)
    reader = spools(1 << 20)
    spool, _ = reader.read_soon(world.job.id)
    until(lambda: spool.problem, "the disk is full")
    assert spool.problem.startswith(f"disk full: cannot write {spool.path} (No space left on device)")
    assert (spool.mark.end, os.path.getsize(spool.path)) == (0, 0)
    full.clear()
    assert _plain(_lines(_completed(reader, world, tmp_path))) == _plain(world.job.logs())
    reader.remove(world.job.id)
    assert not os.path.exists(spool.path)


def test_an_unreachable_target_is_503_with_the_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        """A job whose machine does not respond after its first line."""

        record, native_id = world.job.record, world.job.native_id

        def read_logs(self, since: Cursor) -> Iterator[LogLine]:
            if since.position("rank-0.a0") is None:
                yield LogLine(rank=0, text="first\n", source="rank-0.a0", position="6")
            raise Unreachable("host lab-3 does not respond")

    away = world.context.store.new_id()
    _add_row(world.context, away)
    monkeypatch.setattr("accel.serve.spool.find", lambda job_id, store: Away())
    path = f"/api/v1/jobs/{away}/logs"
    answer = world.get("", path)
    assert [line.text for line in _lines(answer.content)] == ["first\n"]
    assert answer.headers["Accel-More"] == "true"
    assert world.fails(f"?since={answer.headers['Accel-Offset']}", path) == (503, "host lab-3 does not respond")
    assert world.fails("?tail=1", path)[0] == 503
    world.context.spools.remove(away)


def test_a_stream_ends_with_its_token(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.serve.logs._CHECK_S", 0.1)
    assert sse._PING_INTERVAL == 15
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.05)
    waiting = world.context.store.new_id()
    _add_row(world.context, waiting, "submitting")
    with world.context.database.write() as connection:
        token_id, secret = create_token(connection, getpass.getuser())
    answers: list[Any] = []

    def follow() -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        answers.append(world.client.get(f"/api/v1/jobs/{waiting}/logs/stream", headers=headers))

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: world.context.spools.streams.total() == 1, "the stream is open")
    assert world.client.delete(f"/api/v1/tokens/{token_id}").status_code == 204
    thread.join(10)
    assert [(answer.status_code, set(answer.text.split("\n\n"))) for answer in answers] == [(200, {": ping", ""})]
    assert (
        world.client.get(f"/api/v1/jobs/{waiting}/logs", headers={"Authorization": f"Bearer {secret}"}).status_code
        == 401
    )


class _Follower:
    """Requests to a server for one log, each over a connection of its own."""

    def __init__(self, url: str, token: str, job_id: str) -> None:
        self._netloc, self._path = urlsplit(url).netloc, f"/api/v1/jobs/{job_id}/logs"
        self._headers = {"Authorization": f"Bearer {token}"}

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[http.client.HTTPResponse]:
        with contextlib.closing(http.client.HTTPConnection(self._netloc, timeout=30)) as connection:
            connection.request("GET", self._path + path, headers=self._headers)
            with connection.getresponse() as answer:
                yield answer

    def get(self, offset: int) -> bytes:
        with self.open(f"?since={offset}") as answer:
            body = answer.read()
            assert answer.status == 200, body
            return body


@pytest.fixture
def numbered(homes: Path, kills: int) -> Iterator[tuple[Job, str]]:
    """A job that runs NUMBERED with a part for each kill and one more, and an owner's token."""
    settings = read_settings(None, {})
    with open_context(settings) as context:
        people.start(context)
        job = _submit(context.store, homes / "project", NUMBERED.replace("PARTS", str(kills + 1)))
        _add_row(context, job.id)
    yield job, (Path(settings.home) / people.TOKEN_FILE).read_text().strip()
    job.cancel()


@pytest.mark.parametrize("kills", [5, *long(20)])
def test_kills_lose_no_line_and_streams_do_not_keep_a_server(
    serve: Start, homes: Path, numbered: tuple[Job, str], kills: int
) -> None:
    (homes / "config/serve.yaml").write_text("streams: 30\n")
    job, token = numbered
    received = b""
    for part in range(kills):
        server = serve()
        follower = _Follower(server.url, token, job.id)
        (homes / f"project/go-{part}").touch()
        while f"line {part * 20_000 // (kills + 1) + 200} ".encode() not in received:
            received += follower.get(len(received))
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    server = serve()
    follower = _Follower(server.url, token, job.id)
    start, streamed = len(received), b""
    assert b"line 19999 " not in received
    (homes / f"project/go-{kills}").touch()
    with follower.open(f"/stream?since={start}") as stream:
        while b"line 19999 " not in streamed[-500:]:
            streamed += stream.readline()
    while b"line 19999 " not in received:
        received += follower.get(len(received))
    streamed_lines = re.findall(rb"^data: (.*)$", streamed, re.MULTILINE)
    assert streamed_lines == [raw for raw in received[start:].splitlines() if not spool_file.is_mark(raw)]
    assert _plain(_lines(received)) == [(0, f"line {number} {'y' * 40}\n", False) for number in range(20_000)]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(follower.open(f"/stream?since={len(received)}")) for _ in range(30)]
        assert {stream.status for stream in streams} == {200}
        with follower.open("/stream") as refused:
            assert refused.status == 429
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 5
        assert {stream.read() for stream in streams} == {b""}
