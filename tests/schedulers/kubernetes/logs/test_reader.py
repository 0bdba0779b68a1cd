"""How the logs of a job of many pods are asked for, and what comes of some that cannot be had."""

from __future__ import annotations

import dataclasses
import email.utils
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from schedulers import Cursor, JobSpec, LogLine, SchedulerError
from schedulers.kubernetes.logs import archive, sources, streams
from schedulers.kubernetes.logs import reader as readers
from schedulers.kubernetes.logs.cursor import Position
from schedulers.kubernetes.logs.followed_job import FollowedJob
from schedulers.kubernetes.native_id import Native
from schedulers.store.log_lines import MAX_BYTES
from schedulers.store.store import Store
from schedulers.target import Plan
from tests.waiting import until

from ..conftest import MakeApi
from ..servers import Server, reply, serving
from ..shapes import condition, pod, running, terminated, workload

_PODS = 40
_NATIVE = Native("job", "team", "run1", "abc")
_DONE = condition("Complete")
_NO_PODS = "it has no pods (any more), and their logs were not archived"


def _answering(
    *conditions: dict[str, Any],
    again: int | None = None,
    pods: int = _PODS,
    log: bytes | Callable[[Mapping[str, str]], bytes] = b"",
    flags: tuple[str, ...] = ("--quiet",),
    status: dict[str, Any] | None = None,
    nodes: int | None = None,
    gone: bool = False,
    uid: str = "",
    ahead_s: float = 0,
) -> Callable[[Any], None]:
    """An API server that has the pods of a job, each with one line, or this log, which may depend on the query. Of
    `again` another run has begun since. `gone`: the job's object is not there. `ahead_s`: of its clock."""

    nodes = pods if nodes is None else nodes

    def of(node: int, *, restarted: bool = False) -> dict[str, Any]:
        state = running(1) if restarted else terminated(0, "Completed") if conditions else running()
        made = pod(node, state, phase="Succeeded" if conditions else "Running")
        made["metadata"] |= {"name": f"p-{node}", "uid": f"{node:08}", "creationTimestamp": "2026-11-21T10:00:00Z"}
        return {**made, "spec": {"containers": [{"name": "pytorch", "command": ["accel", "launch", *flags, "--"]}]}}

    def answer(handler: Any) -> None:
        handler.date_time_string = lambda: email.utils.formatdate(time.time() + ahead_s, usegmt=True)
        path, query = urlsplit(handler.path).path, dict(parse_qsl(urlsplit(handler.path).query))
        found = re.search(r"/pods/p-(\d+)(/log)?$", path)
        if found and found[2]:
            text = log(query) if callable(log) else log
            reply(handler, text if log else f"2026-11-21T10:00:00Z line of {found[1]}\n".encode())
        elif found:
            reply(handler, of(int(found[1]), restarted=int(found[1]) == again))
        elif path.endswith("/pods"):
            reply(handler, {"kind": "PodList", "items": [of(node) for node in range(pods)]})
        elif gone:
            handler.send_error(404)
        else:
            reply(handler, workload("Job", *conditions, nodes=nodes, status=status, uid=uid))

    return answer


def _logs(server: Server) -> int:
    return sum("/log?" in asked for asked in server.asked)


def test_so_many_logs_are_held_at_a_time(make: MakeApi) -> None:
    """Each takes memory, or an open file, from when it is asked for until its lines are given."""
    with serving(_answering(_DONE)) as server:
        lines = readers.Reader(make(server.url)).read(_NATIVE, None, None, finished=True)
        found: list[LogLine] = [next(lines)]
        assert _logs(server) <= 16
        found += lines
        assert _logs(server) == _PODS
    assert [(line.rank, line.text) for line in found] == [(node, f"line of {node}\n") for node in range(_PODS)]


def test_a_log_that_may_be_of_another_run_is_looked_at_again_and_then_left_for_the_next_time(make: MakeApi) -> None:
    with serving(_answering(again=3)) as server:
        found = list(readers.Reader(make(server.url)).read(_NATIVE, None, None, finished=False))
        lists = [asked for asked in server.asked if "/pods?" in asked]
    assert [line.rank for line in found] == [node for node in range(_PODS) if node != 3]
    assert len(lists) == readers._MAX_PASSES


def test_a_disk_that_is_full_is_said(make: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MAX_IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with serving(_answering(_DONE)) as server, pytest.raises(SchedulerError) as refusal:
        list(readers.Reader(make(server.url)).read(_NATIVE, None, None, finished=True))
    words = "output of node 0 cannot be buffered: /nowhere: no such file or directory"
    assert str(refusal.value) == f"target k: {words}"


def test_two_readers_at_one_place_do_not_take_from_one_stream(make: MakeApi) -> None:
    """Each of them would miss what the other one took between its look at the stream and its hand in it."""
    with serving(_answering(_DONE)) as server:
        api, job = make(server.url), FollowedJob()
        first, second = (readers._ReadPass(api, _NATIVE, job, None, None, finished=True) for _ in range(2))
        log = SimpleNamespace(name="log")
        tail: Any = SimpleNamespace(at=None, holder=None, source=log)
        job.add(tail)
        assert (first._tail("log"), second._tail("log")) == (tail, None)
        tail.holder = None
        assert (second._tail("log"), first._tail("log")) == (tail, None)
        job.add(SimpleNamespace(at=None, holder=None, source=log))  # type: ignore[arg-type]
        tail.holder = None
        assert second._own_tails() == [tail]  # both would give it the same lines


def test_long_lines_of_ranks_that_share_a_log(make: MakeApi) -> None:
    """As `--tee` prints them: where another rank's line comes in their midst, they are marked and go on later."""
    first, second = b"x" * (3 << 20), b"y" * (1 << 20)
    lines = [b"[rank 0] " + first + b"\x1f", b"[rank 1] hello", b"[rank 0] " + second + b"\x1f", b"[rank 1] you"]
    lines += [b"[rank 0] the end", b"[rank 1] \x1f"]
    log = b"".join(b"2026-11-21T10:00:00.%dZ %s\n" % (number, line) for number, line in enumerate(lines))
    with serving(_answering(_DONE, pods=1, log=log, flags=("--quiet", "--tee", "3"))) as server:
        reader = readers.Reader(make(server.url))
        found = list(reader.read(_NATIVE, None, None, finished=True))
        for number in (1, 3, 4, 5, 7):
            cursor = Cursor()
            for line in found[:number]:
                cursor.advance(line)
            assert list(reader.read(_NATIVE, cursor, None, finished=True)) == found[number:]
    of_rank = [[line for line in found if line.rank == rank] for rank in (0, 1)]
    assert "".join(line.text for line in of_rank[0]).encode() == first + second + b"the end\n"
    assert [line.partial for line in of_rank[0]] == [True] * (len(of_rank[0]) - 1) + [False]
    assert all(len(line.text) <= MAX_BYTES for line in found)
    assert [line.text for line in of_rank[1]] == ["hello\n", "you\n", "\x1f\n"]
    assert [line.partial for line in of_rank[1]] == [False] * 3


_ABSENT = b'failed to try resolving symlinks in path "/var/log/pods/team_p-0/pytorch/0.log": no such file or directory'
_GREETING = b"2026-11-21T10:00:00Z accel launch: started on p-0\n"
_ROTATED = "accel: some output of node 0 may be missing: its log was rotated before it was read\n"


def _cursor(lines: list[LogLine]) -> Cursor:
    cursor = Cursor()
    for line in lines:
        cursor.advance(line)
    return cursor


def test_a_log_that_the_kubelet_cannot_find_for_now_is_queried_again(
    make: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_ABSENT_PAUSE_S", 0.0)
    answers = [_ABSENT, b"unable to retrieve container logs for containerd://0123", b"2026-11-21T10:00:00Z here\n"]
    with serving(_answering(_DONE, pods=1, log=lambda query: answers.pop(0))) as server:
        found = list(readers.Reader(make(server.url)).read(_NATIVE, None, None, finished=True))
    assert [line.text for line in found] == ["here\n"]


def test_a_log_that_the_kubelet_does_not_find_again_is_reported_once(
    make: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_ABSENT_PAUSE_S", 0.0)
    with serving(_answering(_DONE, pods=1, log=_ABSENT)) as server:
        reader = readers.Reader(make(server.url))
        (line,) = reader.read(_NATIVE, None, None, finished=True)
        assert list(reader.read(_NATIVE, _cursor([line]), None, finished=True)) == []
    text = "accel: output of node 0 is missing: the cluster no longer has its log\n"
    assert (line.stream, line.text) == ("missing", text)


@pytest.mark.parametrize("rest", [b"", b"2026-11-21T10:00:30Z the end\n"])
def test_a_place_that_was_rotated_away_is_reported_once(make: MakeApi, rest: bytes) -> None:
    """Also where nothing was written after the rotation."""
    first = b"2026-11-21T10:00:01Z one\n"
    with serving(_answering(pods=1, log=first)) as server:
        lines = list(readers.Reader(make(server.url)).read(_NATIVE, None, None, finished=False))
    with serving(_answering(_DONE, pods=1, log=lambda query: rest)) as server:
        reader = readers.Reader(make(server.url))
        (gap, *more) = reader.read(_NATIVE, _cursor(lines), None, finished=True)
        assert list(reader.read(_NATIVE, _cursor([*lines, gap, *more]), None, finished=True)) == []
    assert (gap.stream, gap.text) == ("missing", _ROTATED)
    assert [line.text for line in more] == (["the end\n"] if rest else [])


def test_a_log_without_the_launcher_s_first_line_has_lost_its_beginning(make: MakeApi) -> None:
    def texts(log: bytes | Callable[[Mapping[str, str]], bytes]) -> list[str]:
        with serving(_answering(_DONE, pods=1, log=log, flags=())) as server:
            reader = readers.Reader(make(server.url))
            lines = list(reader.read(_NATIVE, None, None, finished=True))
            assert list(reader.read(_NATIVE, _cursor(lines), None, finished=True)) == []
        return [line.text for line in lines]

    line = b"2026-11-21T10:00:09Z a line\n"
    assert texts(_GREETING + line) == ["accel launch: started on p-0\n", "a line\n"]
    assert texts(b"2026-11-21T10:00:00Z ld.so: a warning\n" + _GREETING)[1:] == ["accel launch: started on p-0\n"]
    assert texts(line) == ["a line\n", _ROTATED]
    assert texts(lambda query: b"") == [_ROTATED]
    many = texts(line * 20_000)
    assert many.count(_ROTATED) == 1
    assert len(many) == 20_001


@pytest.mark.parametrize("dropped", [False, True])
def test_a_log_without_its_beginning_is_reported_also_after_its_stream_has_ended_before_its_pod(
    make: MakeApi, tmp_path: Path, dropped: bool
) -> None:
    """The kubelet ends a stream with its container, of which the API server learns later, or the connection is lost:
    another stream, or reader, goes on."""
    log = b"2026-11-21T10:00:09Z later\n"

    def drop(handler: Any) -> None:
        if "follow" not in handler.path:
            _answering(pods=1, log=log, flags=())(handler)
            return
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(log), log))

    answers = [drop if dropped else _answering(pods=1, log=log, flags=())]
    lines: list[LogLine] = []
    with serving(lambda handler: answers[0](handler)) as server:
        reader = readers.Reader(make(server.url))
        reader.mark_followed(_NATIVE)

        def is_read() -> bool:
            lines.extend(reader.read(_NATIVE, _cursor(lines), tmp_path, finished=False))
            return bool(lines) and not reader._job(_NATIVE).all_tails()

        until(is_read, "the line is read, and its stream has ended")
        assert [line.text for line in lines] == ["later\n"]
        answers[0] = _answering(_DONE, pods=1, log=log, flags=())
        elsewhere = list(readers.Reader(make(server.url)).read(_NATIVE, _cursor(lines), None, finished=True))
        lines += reader.read(_NATIVE, _cursor(lines), tmp_path, finished=True)
        assert list(reader.read(_NATIVE, _cursor(lines), tmp_path, finished=True)) == []
        assert [line.text for line in lines[1:]] == [line.text for line in elsewhere] == [_ROTATED]
        archived = archive.archived_logs(tmp_path)[lines[0].source]
    assert archived.missing == "its log was rotated before it was read"


def test_a_log_without_its_beginning_is_reported_also_where_only_its_stream_is_left(make: MakeApi) -> None:
    log = b"2026-11-21T10:00:09Z later\n"
    answers = [_answering(_DONE, pods=1, log=log, flags=())]
    with serving(lambda handler: answers[0](handler)) as server:
        api, job = make(server.url), FollowedJob()
        (source,) = sources.list_sources([_pod_of(server, api)])
        tail = streams.ContainerLogStream(api, _NATIVE, source, None, own=True)
        tail._thread.join()
        job.add(tail)
        job.known_sources[source.name] = source
        answers[0] = _answering(_DONE, pods=0, nodes=1)
        lines = list(readers._ReadPass(api, _NATIVE, job, None, None, finished=True).lines())
    assert [line.text for line in lines] == ["later\n", _ROTATED]


@pytest.mark.parametrize("followed", [True, False])
def test_a_cancel_keeps_what_is_known_to_be_missing(make: MakeApi, tmp_path: Path, followed: bool) -> None:
    """Of a log that a follower has archived, and of one that only the cancel reads."""
    log = b"2026-11-21T10:00:09Z later\n"
    with serving(_answering(_DONE, pods=1, log=log, flags=())) as server:
        api = make(server.url)
        if followed:
            reader = readers.Reader(api)
            reader.mark_followed(_NATIVE)
            assert list(reader.read(_NATIVE, None, tmp_path, finished=True))
        assert archive.archive_job(api, _NATIVE, tmp_path) is None
    with serving(_answering(_DONE, pods=0, nodes=1)) as server:
        lines = list(readers.Reader(make(server.url)).read(_NATIVE, None, tmp_path, finished=True))
    missing = "accel: some output of node 0 is missing: its log was rotated before it was read\n"
    assert [line.text for line in lines] == ["later\n", missing]


def test_the_rest_of_a_stream_is_read_where_the_place_was_rotated_away(make: MakeApi) -> None:
    """The container has ended, and its log begins anew after the line that was read last."""
    stamp = "2026-11-21T10:00:0{}Z line {}\n"
    whole = "".join(stamp.format(number, number) for number in range(9)).encode()
    current = stamp.format(8, 8).encode()

    def log(query: Mapping[str, str]) -> bytes:
        return whole if "follow" in query else current

    with serving(_answering(_DONE, pods=1, log=log)) as server:
        api, job = make(server.url), FollowedJob()
        (source,) = sources.list_sources([_pod_of(server, api)])
        tail = streams.ContainerLogStream(api, _NATIVE, source, None, own=True)
        job.add(tail)
        tail._thread.join()
        tail._chunks, late = tail._chunks[:2], tail._chunks[2:]
        lines = readers._ReadPass(api, _NATIVE, job, None, None, finished=True).lines()
        found = [next(lines).text for _ in range(2)]
        tail._chunks = late
        assert found + [line.text for line in lines] == [f"line {number}\n" for number in range(9)]


def _pod_of(server: Server, api: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.call("GET", "/api/v1/namespaces/team/pods")["items"][0]
    return found


def test_lines_that_a_stream_has_skipped_are_a_gap(make: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet goes on with the newest file of a log where the reader was two rotations behind."""
    monkeypatch.setattr(streams, "_COMPLETE_S", -1.0)
    stream = b"2026-11-21T10:00:01Z one\n2026-11-21T10:00:11Z two\n2026-11-21T10:00:31Z three\n"

    def log(query: Mapping[str, str]) -> bytes:
        if "follow" in query:
            return stream
        return b"2026-11-21T10:00:01Z one\n" if "10:00:00" in query["sinceTime"] else b"2026-11-21T10:00:31Z three\n"

    with serving(_answering(_DONE, pods=1, log=log)) as server:
        api = make(server.url)
        (source,) = sources.list_sources([_pod_of(server, api)])
        tail = streams.ContainerLogStream(api, _NATIVE, source, None, own=True)
        assert [(piece.data, piece.gap) for piece in tail.rest()] == [
            (b"one\n", False), (b"two\n", False), (b"three\n", True)
        ]  # fmt: skip


def test_a_line_for_each_node_and_pod_whose_log_is_gone(make: MakeApi) -> None:
    with serving(_answering(_DONE, pods=1, nodes=3, status={"failed": 2})) as server:
        reader = readers.Reader(make(server.url))
        lines = list(reader.read(_NATIVE, None, None, finished=True))
        assert list(reader.read(_NATIVE, _cursor(lines), None, finished=True)) == []
    assert [line.text for line in lines if line.stream == "output"] == ["line of 0\n"]
    assert [line.text for line in lines if line.stream == "missing"] == [
        "accel: output of node 1 is missing: its pod is gone\n",
        "accel: output of node 2 is missing: its pod is gone\n",
        "accel: output of 2 failed pods is missing: removed by the cluster\n",
    ]


def _made_for(attempt: int | None, node: int, *containers: dict[str, Any]) -> dict[str, Any]:
    label = {} if attempt is None else {"jobset.sigs.k8s.io/restart-attempt": str(attempt)}
    return pod(node, *containers, phase="Failed", labels=label, uid=f"{attempt or 0:04}{node:04}")


@pytest.mark.parametrize(
    ("runs", "ran", "lines"),
    [
        (
            [(2, 0), (2, 1)],
            {2},
            [
                "output of attempt 0 is missing: its pods are gone",
                "output of attempt 1 is missing: its pods are gone",
            ],
        ),
        ([(0, 0), (0, 1), (2, 0), (2, 1)], {0, 2}, ["output of attempt 1 is missing: its pods are gone"]),
        ([(0, 0), (1, 0), (1, 1)], {0, 1}, ["output of node 1 in attempt 0 is missing: its pod is gone"]),
        ([(0, 0), (0, 1), (1, 1)], {0, 1}, ["output of node 0 in attempt 1 is missing: its pod is gone"]),
        ([(0, 0), (1, 0), (1, 1)], {1}, []),  # the other pod of the first attempt may never have run
        ([(0, 0)], {0}, ["output of node 1 is missing: its pod is gone"]),
        ([(0, 0)], set(), []),
        # Pods that are restarted one by one have attempts of their own.
        ([(None, 0), (None, 0), (None, 0), (None, 1)], {0, 1, 2}, []),
        ([(None, 0), (None, 0)], {1}, ["output of node 1 is missing: its pod is gone"]),
    ],
)
def test_a_line_for_each_node_and_attempt_whose_log_is_gone(
    runs: list[tuple[int | None, int]], ran: set[int], lines: list[str]
) -> None:
    pods = [_made_for(attempt, node, terminated(1)) for attempt, node in runs]
    together = runs[0][0] is not None
    found = sources.list_sources(pods)
    missing = sources.missing_logs([], found, nodes=2, gang_restart=together, restarts=0, attempts_run=ran, failures=0)
    assert [what for _, what in missing] == lines
    # A pod that is there has not written anything when it has no log.
    waiting = [_made_for(attempt, 1) for attempt in ({attempt for attempt, _ in runs})]
    missing = sources.missing_logs(
        waiting, found, nodes=2, gang_restart=together, restarts=0, attempts_run=ran, failures=0
    )
    assert not [what for _, what in missing if "node 1" in what]


def test_what_brought_the_code_is_no_log_of_a_node() -> None:
    code = terminated(0, "Completed", name="accel-code")
    found = sources.list_sources(
        [_made_for(0, 0, code, terminated(1)), _made_for(0, 1, code), _made_for(1, 0, terminated(1))]
    )

    def missing(*ran: int) -> list[str]:
        lines = sources.missing_logs([], found, nodes=2, gang_restart=True, restarts=0, attempts_run=ran, failures=0)
        return [what for _, what in lines]

    assert missing() == []
    assert missing(0) == ["output of node 1 in attempt 0 is missing: its pod is gone"]


@pytest.mark.parametrize("line", ["a line of rank 0", ""])
def test_a_node_whose_log_is_gone_with_the_job_s_object(make: MakeApi, tmp_path: Path, line: str) -> None:
    """How many nodes there were, its record tells. Before its ranks have started, not all of them may have run."""
    store, spec = Store(tmp_path), JobSpec(argv=("train.py",), code=str(tmp_path), nodes=2)
    job_id = store.new_id()
    plan = Plan(target="k", kind="kubernetes", job_id=job_id)
    record = store.create(job_id, spec, plan, target="k", kind="kubernetes", options={})
    native = Native("job", "team", "run1", job_id)
    log = _GREETING + (f"2026-11-21T10:00:01Z {line}\n".encode() if line else b"")
    with serving(_answering(_DONE, pods=1, nodes=1, log=log, flags=())) as server:
        reader = readers.Reader(make(server.url))
        reader.mark_followed(native)
        followed = list(reader.read(native, None, record.directory, finished=True))
    with serving(_answering(pods=0, gone=True)) as server:
        reader = readers.Reader(make(server.url))
        lines = list(reader.read(native, None, record.directory, finished=True))
        assert list(reader.read(native, _cursor(lines), record.directory, finished=True)) == []
        elsewhere = list(reader.read(native, _cursor(followed), tmp_path / "elsewhere", finished=True))
    missing = ["accel: output of node 1 is missing: its pod is gone\n"] if line else []
    assert [each.text for each in lines] == [each.text for each in followed] + missing
    assert not [each.text for each in elsewhere if "node 1" in each.text]


def test_what_a_follower_read_of_a_pod_is_there_when_the_pod_is_gone(make: MakeApi, tmp_path: Path) -> None:
    log = b"".join(b"2026-11-21T10:00:0%dZ line %d\n" % (number, number) for number in range(5))
    with serving(_answering(_DONE, pods=1, log=log)) as server:
        reader = readers.Reader(make(server.url))
        reader.mark_followed(_NATIVE)
        lines = list(reader.read(_NATIVE, None, tmp_path, finished=True))
        again = list(reader.read(_NATIVE, None, tmp_path, finished=True))
    assert [line.text for line in lines] == [f"line {number}\n" for number in range(5)] == [line.text for line in again]
    with serving(_answering(_DONE, pods=0, nodes=1)) as server:
        reader = readers.Reader(make(server.url))
        assert list(reader.read(_NATIVE, None, tmp_path, finished=True)) == lines
        assert list(reader.read(_NATIVE, _cursor(lines[:2]), tmp_path, finished=True)) == lines[2:]


@pytest.mark.parametrize("over", [True, False])
def test_the_pods_of_a_later_object_of_the_same_name_are_not_the_job_s(
    make: MakeApi, tmp_path: Path, over: bool
) -> None:
    native = dataclasses.replace(_NATIVE, uid="u-1")
    with serving(_answering(_DONE, pods=1, log=b"2026-11-21T10:00:00Z old\n", uid="u-1")) as server:
        reader = readers.Reader(make(server.url))
        reader.mark_followed(native)
        assert [line.text for line in reader.read(native, None, tmp_path, finished=True)] == ["old\n"]
    with serving(_answering(pods=1, log=b"2026-11-21T11:00:00Z new\n", uid="u-2")) as server:
        reader = readers.Reader(make(server.url))
        archived = [line.text for line in reader.read(native, None, tmp_path, finished=over)]
        lines = list(reader.read(native, None, tmp_path / "elsewhere", finished=over))
        assert list(reader.read(native, _cursor(lines), tmp_path / "elsewhere", finished=over)) == []
        assert str(reader.cursor_at(native, 1e9, None)) == ""
    assert archived == ["old\n"]
    assert [(line.stream, line.text) for line in lines] == [
        ("missing", f"accel: {_NO_PODS}: a later Job has its name\n")
    ]


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_time_in_the_logs_is_one_of_the_cluster_s_clock(make: MakeApi, ahead_s: int) -> None:
    """As the lines have it, whatever the clock of this machine says."""
    with serving(_answering(pods=1, ahead_s=ahead_s)) as server:
        when = time.time() - 60
        place = str(readers.Reader(make(server.url)).cursor_at(_NATIVE, when, None))
    assert abs(Position.parse(place.partition("=")[2]).seconds - when - ahead_s) < 30


def test_what_a_follower_did_not_read_is_said_to_be_missing(make: MakeApi, tmp_path: Path) -> None:
    with serving(_answering(pods=1, log=b"2026-11-21T10:00:00Z one\n2026-11-21T10:00:00Z tw")) as server:
        reader = readers.Reader(make(server.url))
        reader.mark_followed(_NATIVE)
        lines: list[LogLine] = []

        def is_read() -> bool:
            lines.extend(reader.read(_NATIVE, _cursor(lines), tmp_path, finished=False))
            return bool(lines)

        until(is_read, "a line is read")
        reader.close()
    with serving(_answering(_DONE, pods=0, nodes=1)) as server:
        found = [line.text for line in readers.Reader(make(server.url)).read(_NATIVE, None, tmp_path, finished=True)]
    assert found == ["one\n", "accel: some output of node 0 is missing: it was not read to its end\n"]
