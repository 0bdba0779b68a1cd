"""Logs through the API server: what programs wrote, byte for byte, once, whatever becomes of their pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Cursor, Job, LogLine, State, Store
from schedulers.errors import Unreachable
from schedulers.kubernetes.logs import reader, streams
from schedulers.kubernetes.native_id import Native
from tests.clusters.kubernetes import Kubernetes
from tests.marks import long
from tests.waiting import comes, until

from ..conftest import Submit

# Waits until the test says that it may go on. The directory is the host's.
_UNTIL = "until [ -e {there} ]; do sleep 0.05; done"


class Follower(threading.Thread):
    """Reads a job's output as it comes."""

    def __init__(self, job: Job, since: Cursor | None = None) -> None:
        super().__init__(daemon=True)
        self._job = job
        self._since = since
        self.lines: list[LogLine] = []
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for line in self._job.logs(follow=True, since=self._since):
                self.lines.append(line)
        except BaseException as error:
            self.failure = error

    def text(self, rank: int | None = 0, attempt: int | None = None) -> str:
        return _text(self.lines, rank, attempt)

    def ended(self) -> list[LogLine]:
        self.join(120)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
        return self.lines


def _text(lines: list[LogLine], rank: int | None = 0, attempt: int | None = None) -> str:
    return "".join(
        line.text for line in lines if line.rank == rank and line.stream == "output" and attempt in (None, line.attempt)
    )


def _host(directory: Path) -> dict[str, object]:
    """Options that show a directory of this computer to the pods."""
    return {"pod_security": "privileged", "volumes": [{"mount": str(directory), "host_path": str(directory)}]}


@pytest.fixture
def shared(tmp_path: Path, kubernetes: Kubernetes) -> Path:
    directory = tmp_path / "shared"
    kubernetes.share(directory)
    return directory


def _cursor(lines: list[LogLine]) -> Cursor:
    cursor = Cursor()
    for line in lines:
        cursor.advance(line)
    return cursor


def _counting(directory: Path, rank: str = "") -> str:
    """Counts until the file `end` is there, and says how far it came."""
    end = directory / "end"
    return f"n=0; while [ ! -e {end} ]; do n=$((n + 1)); echo {rank}line $n; sleep 0.02; done; echo {rank}the end of $n"


def _counted(text: str, rank: str = "") -> None:
    """That nothing is missing, doubled or out of order."""
    *lines, last = text.splitlines()
    assert lines == [f"{rank}line {number + 1}" for number in range(len(lines))]
    assert last == f"{rank}the end of {len(lines)}"


def test_what_a_program_wrote_comes_back_byte_for_byte(submit: Submit) -> None:
    """But for a `\\r` before a line's end, which containerd leaves out."""
    job = submit(r"printf 'a\377\200b\n\n\303'; sleep 0.3; printf '\274\r 50%%\r100%%\r\nlast'")
    assert job.wait(90).state is State.SUCCEEDED
    lines = list(job.logs())
    program = [line for line in lines if line.rank == 0]
    written = "".join(line.text for line in program).encode("utf-8", "surrogateescape")
    assert written.replace(b"\r\n", b"\n") == b"a\xff\x80b\n\n\xc3\xbc\r 50%\r100%\nlast"
    texts = [line.text.replace("\r\n", "\n") for line in program]
    assert texts == ["a\udcff\udc80b\n", "\n", "ü\r", " 50%\r", "100%\n", "last"]
    for number in range(len(lines) + 1):
        assert list(job.logs(since=_cursor(lines[:number]))) == lines[number:]


def test_ranks_of_a_pod_are_told_apart(submit: Submit, shared: Path) -> None:
    """Two pods of two ranks each, followed and read afterwards."""
    text = f"echo I am $RANK; {_counting(shared, '$RANK ')}"
    job = submit(text, nodes=2, procs_per_node=2, options=_host(shared))
    follower = Follower(job)
    until(lambda: all("line 20\n" in follower.text(rank) for rank in range(4)), "every rank writes")
    (shared / "end").touch()
    assert job.wait(90).state is State.SUCCEEDED
    followed = follower.ended()
    for lines in (followed, list(job.logs())):
        for rank in range(4):
            first, rest = _text(lines, rank).split("\n", 1)
            assert first == f"I am {rank}"
            _counted(rest, f"{rank} ")
        assert {line.rank for line in lines} <= {None, 0, 1, 2, 3}
        assert all("[rank" not in line.text for line in lines)
        assert len({line.source for line in lines}) == 2


def test_the_report_of_a_failure_is_the_launcher_s(submit: Submit) -> None:
    """Also where a pod has one rank, whose lines bear no prefix."""
    text = r"""
        printf 'mine\n  error:  mine too\n'; [ $RANK = 1 ] || sleep 600
        exec python3 -c 'raise MemoryError("mine")'
    """
    job = submit(text, nodes=2)
    followed = Follower(job).ended()
    assert job.status().state is State.FAILED
    mine = _text(followed, 1)
    assert mine.startswith("mine\n  error:  mine too\nTraceback")
    assert mine.endswith("MemoryError: mine\n")
    assert _text(followed, 0) == "mine\n  error:  mine too\n"
    report = _text(followed, None)
    assert "accel launch: rank 1 on node 1" in report
    assert "failed first, in attempt 0: exited with code 1\n" in report


Streams = list[streams.ContainerLogStream]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """The streams of this test's readers."""
    found: Streams = []

    def tail(*args: Any, **how: Any) -> streams.ContainerLogStream:
        found.append(streams.ContainerLogStream(*args, **how))
        return found[-1]

    monkeypatch.setattr(reader, "ContainerLogStream", tail)
    return found


def _stream_of(line: LogLine, opened: Streams) -> None:
    """Waits until the log is read by a stream, which is known to be that of its run: what comes just before the pod
    goes is surely read then."""

    def is_read() -> bool:
        return any(tail.opened and tail.run_confirmed for tail in opened if tail.source.name == line.source)

    until(is_read, "a stream is opened")


def test_a_stream_outlives_the_log_that_the_cluster_keeps(submit: Submit, shared: Path, opened: Streams) -> None:
    """A reader that was away while its container ran three more times has the end of what it was reading."""
    count, more, go = shared / "count", shared / "more", shared / "go"
    text = f"""
        run=$(cat {count} 2>/dev/null || echo 0); echo $((run + 1)) > {count}; echo run $run
        {_UNTIL.format(there=more)}; echo more; {_UNTIL.format(there=go)}; printf "its end"; [ $run -ge 3 ] || exit 7
    """
    job = submit(text, max_restarts=3, options=_host(shared))
    lines = job.logs(follow=True)
    first = next(lines)

    def write_more() -> None:
        _stream_of(first, opened)
        more.touch()

    waiter = threading.Thread(target=write_more)
    waiter.start()
    second = next(lines)
    waiter.join()
    go.touch()
    until(lambda: job.status(refresh=True).state is State.SUCCEEDED, "it has run four times")
    assert _text([first, second, *lines], 0, 0) == "run 0\nmore\nits end"


def test_restarts_are_attempts_and_every_run_is_read_to_its_end(submit: Submit, shared: Path, tmp_path: Path) -> None:
    """The container is restarted three times, while it is followed: its runs, though the cluster keeps one or two.

    A run goes on only once the run before it was read: the cluster removes nothing that is still wanted.
    """
    count = shared / "count"
    text = f"""
        run=$(cat {count} 2>/dev/null || echo 0); echo $((run + 1)) > {count}
        [ $run = 0 ] || {_UNTIL.format(there=f"{shared}/read$((run - 1))")}
        n=0; while [ $n -lt 200 ]; do n=$((n + 1)); echo run $run line $n; done; printf "run $run ends"
        [ $run -ge 3 ] || exit 7
    """
    job = submit(text, max_restarts=3, options=_host(shared))
    follower = Follower(job)
    for run in range(3):
        until(lambda run=run: "ends" in follower.text(0, run), f"run {run} is read")  # type: ignore[misc]
        (shared / f"read{run}").touch()
    followed = follower.ended()
    assert job.status().state is State.SUCCEEDED
    assert job.status().attempt == 3
    for run in range(4):
        wanted = "".join(f"run {run} line {n + 1}\n" for n in range(200)) + f"run {run} ends"
        assert _text(followed, 0, run).startswith(wanted)
    assert sum(line.text.startswith("run ") for line in followed) == 4 * 201
    assert not [line for line in followed if line.stream == "missing"]
    # What was followed is archived.
    assert schedulers.find(job.id).status().state is State.SUCCEEDED
    assert sorted(line.text for line in schedulers.find(job.id).logs()) == sorted(line.text for line in followed)
    # Elsewhere, what the cluster no longer has is reported, once.
    elsewhere = schedulers.find(job.id, Store(tmp_path / "elsewhere"), target="kubernetes")
    late = list(elsewhere.logs())
    assert [line.attempt for line in late if line.stream == "missing"][:2] == [0, 1]
    assert _text(late, 0, 3).startswith("run 3 line 1\n")
    assert list(elsewhere.logs(since=_cursor(late))) == []


def test_a_run_that_ends_just_before_the_one_before_it_is_asked_for_is_not_taken_for_that(
    submit: Submit, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was the run before when the pods were looked at is another one when the kubelet answers."""
    go = shared / "go"
    text = f"""
        run=$(cat {shared}/count 2>/dev/null || echo 0); echo $((run + 1)) > {shared}/count; echo run $run
        [ $run != 1 ] || {_UNTIL.format(there=go)}; [ $run -ge 2 ] || exit 7
    """
    job = submit(text, max_restarts=2, options=_host(shared))
    until(lambda: job.status(refresh=True).attempt == 1, "it runs for the second time")
    asked: list[int] = []

    def late(*args: Any, **how: Any) -> streams.LogResponse:
        source = args[2]
        if source.previous and not asked:
            asked.append(source.run)
            go.touch()
            until(lambda: job.status(refresh=True).attempt == 2, "the second run has ended")
        return streams.fetch(*args, **how)

    monkeypatch.setattr(reader, "fetch", late)
    lines = list(job.logs())
    assert asked == [0]
    assert job.wait(90).state is State.SUCCEEDED
    lines += job.logs(since=_cursor(lines))
    written = [(line.attempt, line.text) for line in lines if line.stream == "output" and line.rank is not None]
    missing = [line.attempt for line in lines if line.stream == "missing"]
    # The cluster may have removed the second run too by then, read or not.
    assert missing in ([0], [0, 1])
    both = [(1, "run 1\n"), (2, "run 2\n")]
    assert written == both or (written == both[1:] and 1 in missing)


def test_a_pod_that_goes_just_when_its_log_is_asked_for_has_been_read(
    kubernetes: Kubernetes,
    namespace: str,
    submit: Submit,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: Streams,
) -> None:
    """It was followed: the stream has what the cluster no longer does, to the line that has no end."""
    more, go = (_UNTIL.format(there=shared / name) for name in ("more", "go"))
    job = submit(f"echo one; {more}; echo two; {go}; echo three; printf end", options=_host(shared))
    gone: list[str] = []

    def late(*args: Any, **how: Any) -> streams.LogResponse:
        source = args[2]
        if source.ended and not gone:
            gone.append(source.pod)
            kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{source.pod}")
            until(lambda: not kubernetes.pods(namespace), "it is gone")
        return streams.fetch(*args, **how)

    monkeypatch.setattr(reader, "fetch", late)
    follower = Follower(job)
    until(lambda: "one\n" in follower.text(), "it is read")
    _stream_of(follower.lines[-1], opened)
    (shared / "more").touch()
    until(lambda: "two\n" in follower.text(), "it is followed")
    (shared / "go").touch()
    assert _text(follower.ended()) == "one\ntwo\nthree\nend"
    assert gone
    assert not [line for line in follower.lines if line.stream == "missing"]


@pytest.mark.alone
def test_a_job_is_followed_over_restarts_of_the_api_server(
    kubernetes: Kubernetes, submit: Submit, shared: Path
) -> None:
    job = submit(_counting(shared), options=_host(shared))
    follower = Follower(job)
    for _ in range(2):
        before = len(follower.lines)
        until(lambda before=before: len(follower.lines) > before + 10, "lines come")  # type: ignore[misc]
        kubernetes.stop_api()
        until(lambda: _unreachable(job), "the cut is noticed")
        kubernetes.start_api()
    before = len(follower.lines)
    until(lambda: len(follower.lines) > before + 10, "lines come again")
    kubernetes.stop_api()
    (shared / "end").touch()  # it ends while nobody can be told
    kubernetes.start_api()
    assert job.wait(90).state is State.SUCCEEDED
    _counted(_text(follower.ended()))
    assert follower.lines == list(job.logs())


def _unreachable(job: Job) -> bool:
    try:
        list(job.logs())
    except Unreachable:
        return True
    return False


def test_two_followers_of_one_handle_each_have_all(submit: Submit, shared: Path) -> None:
    job = submit(_counting(shared), options=_host(shared))
    followers = [Follower(job), Follower(job)]
    until(lambda: all(len(each.lines) > 20 for each in followers), "lines come")
    (shared / "end").touch()
    for each in followers:
        each.ended()
        _counted(each.text())


@pytest.mark.alone  # what the API server counts is everybody's
def test_open_streams_are_read_and_pods_are_not_asked_again_and_again(
    kubernetes: Kubernetes, submit: Submit, shared: Path
) -> None:
    job = submit(_counting(shared), options=_host(shared))
    follower = Follower(job)
    until(lambda: len(follower.lines) > 50, "lines come")
    until(lambda: _all_active(kubernetes), "nobody asks any more what there is in the namespaces of earlier tests")
    before, lines = _requests(kubernetes), len(follower.lines)
    until(lambda: len(follower.lines) > lines + 100, "more lines come")
    asked = _requests(kubernetes) - before
    (shared / "end").touch()
    _counted(_text(follower.ended()))
    # Each look would be one. What earlier tests have watched may be looked for once more, as its namespace is gone.
    assert asked["pods/log"] <= 1
    assert max(asked["pods"], asked["pytorchjobs"]) <= 8


def _all_active(kubernetes: Kubernetes) -> bool:
    namespaces = kubernetes.client.call("GET", "/api/v1/namespaces")["items"]
    return all(each["status"]["phase"] == "Active" for each in namespaces)


def _requests(kubernetes: Kubernetes) -> Counter[str]:
    """What was asked of the API server by us: by name, since everybody else uses other ways."""
    text = kubernetes.client.text("/metrics")
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("apiserver_request_total{") or 'scope="cluster"' in line:
            continue
        labels = dict(part.split("=", 1) for part in line[line.index("{") + 1 : line.index("}")].split(","))
        said = {key: value.strip('"') for key, value in labels.items()}
        if said["verb"] in ("GET", "LIST", "WATCH", "CONNECT"):
            resource = said["resource"] + (f"/{said['subresource']}" if said["subresource"] else "")
            found[resource] += int(float(line.rpartition(" ")[2]))
    return found


def test_a_job_that_never_stops_writing_is_read_from_a_stream_all_the_same(
    submit: Submit, shared: Path, opened: Streams
) -> None:
    job = submit(f"until [ -e {shared}/end ]; do echo on and on; done", options=_host(shared))
    until(lambda: list(job.logs(tail=1)), "it writes")
    follower = Follower(job)
    until(lambda: follower.lines, "lines come")
    _stream_of(follower.lines[-1], opened)
    (shared / "end").touch()
    assert set(_text(follower.ended()).splitlines()) == {"on and on"}


def test_a_pod_that_does_not_run_yet_has_no_lines_and_holds_nobody_up(submit: Submit) -> None:
    job = submit("echo never", options={"image": "example.org/no-such:1"})
    until(lambda: "cannot be pulled" in job.status().message, "it cannot start")
    assert list(job.logs()) == []
    follower = Follower(job)
    time.sleep(0.5)
    assert follower.lines == []
    job.cancel()
    assert not [line for line in follower.ended() if line.stream == "output"]


def test_the_time_from_which_lines_are_wanted(submit: Submit, shared: Path) -> None:
    job = submit(f"echo before; {_UNTIL.format(there=shared / 'go')}; echo after", options=_host(shared))
    until(lambda: "before\n" in _text(list(job.logs())), "it writes")
    time.sleep(1.1 - time.time() % 1)
    when = time.time()
    (shared / "go").touch()
    assert job.wait(90).state is State.SUCCEEDED
    assert _text(list(job.logs(since=when))) == "after\n"
    assert _text(list(job.logs(since=when - 3600))) == "before\nafter\n"
    assert list(job.logs(since=when + 3600)) == []


def test_a_follower_that_is_killed_goes_on_with_its_cursor(
    kubernetes: Kubernetes, submit: Submit, shared: Path, home: Path, tmp_path: Path
) -> None:
    job = submit(_counting(shared), options=_host(shared))
    out = tmp_path / "out"
    env = {**os.environ, "ACCEL_HOME": str(home)}
    argv = [sys.executable, "-m", "accel", "logs", job.id, "-f", "--json"]
    with out.open("wb") as file, subprocess.Popen(argv, stdout=file, env=env) as process:
        until(lambda: out.read_bytes().count(b"line") > 40, "it follows")
        process.send_signal(signal.SIGKILL)
    first = [json.loads(line) for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    cursor = Cursor.parse(first[-1]["cursor"])
    rest = Follower(job, cursor)
    until(lambda: len(rest.lines) > 20, "it goes on")
    (shared / "end").touch()
    rest.ended()
    _counted("".join(line["text"] for line in first if line["rank"] == 0) + rest.text())


def test_another_machine_reads_and_follows_a_job_that_it_did_not_submit(
    submit: Submit, shared: Path, tmp_path: Path
) -> None:
    job = submit(_counting(shared), options=_host(shared))
    until(lambda: "line 5\n" in _text(list(job.logs())), "it writes")
    there = schedulers.find(job.id, Store(tmp_path / "elsewhere"), target="kubernetes")
    assert there.native_id == job.native_id
    follower = Follower(there)
    until(lambda: len(follower.lines) > 20, "lines come")
    (shared / "end").touch()
    _counted(_text(follower.ended()))
    assert follower.lines == list(job.logs())


def test_a_job_that_somebody_deletes_is_followed_to_the_end_of_its_pods(
    kubernetes: Kubernetes, namespace: str, submit: Submit, opened: Streams
) -> None:
    """Its object is gone at once, and said to be; its pods have their grace, and words in it."""
    text = "trap 'echo goodbye; sleep 0.3; echo really; exit 0' TERM; echo hello; while :; do sleep 0.05; done"
    job = submit(text, grace_s=10.0)
    follower = Follower(job)
    until(lambda: "hello\n" in follower.text(), "it runs")
    _stream_of(follower.lines[-1], opened)
    native = Native.parse(job.native_id or "")
    path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{native.name}"
    kubernetes.client.call("DELETE", path, {"propagationPolicy": "Background"})
    until(lambda: job.record.reload().status.state.final, "it is said")
    assert job.record.status.native_state == "Deleted"
    assert "hello\ngoodbye\nreally\n" in _text(follower.ended())


def test_the_last_words_after_a_job_was_deleted_are_read_also_when_they_come_with_the_end(
    kubernetes: Kubernetes, namespace: str, submit: Submit, shared: Path, opened: Streams
) -> None:
    go = _UNTIL.format(there=shared / "go")
    text = f"trap '{go}; echo last; printf words; exit 0' TERM; echo hello; while :; do sleep 0.05; done"
    job = submit(text, grace_s=60.0, options=_host(shared))
    follower = Follower(job)
    until(lambda: "hello\n" in follower.text(), "it runs")
    _stream_of(follower.lines[-1], opened)
    path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{Native.parse(job.native_id or '').name}"
    kubernetes.client.call("DELETE", path, {"propagationPolicy": "Background"})
    until(lambda: job.status().native_state == "Deleting", "it is said")
    (shared / "go").touch()
    assert _text(follower.ended()) == "hello\nlast\nwords"


def test_a_pod_that_goes_when_it_is_asked_what_it_wrote_so_far_is_said(
    kubernetes: Kubernetes, namespace: str, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the pods and the kubelet's answer: not as if it had written nothing."""
    job = submit("echo one; exec sleep 1000")
    until(lambda: "one\n" in _text(list(job.logs())), "it runs")
    asked: list[str] = []

    def late(*args: Any, **how: Any) -> streams.LogResponse:
        if not asked:
            asked.append(args[2].pod)
            # The operator would make a pod of the same name where it does not see how this one ends.
            path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/{Native.parse(job.native_id or '').name}"
            kubernetes.client.call("DELETE", path, {"propagationPolicy": "Orphan"})
            kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{asked[0]}")
            until(lambda: asked[0] not in [pod["metadata"]["name"] for pod in kubernetes.pods(namespace)], "it is gone")
        return streams.fetch(*args, **how)

    monkeypatch.setattr(reader, "fetch", late)
    (said,) = job.logs()
    assert asked
    assert (said.stream, said.text) == ("missing", "accel: output of node 0 is missing: its pod is gone\n")


def test_pods_that_are_gone_are_said_and_what_was_read_of_them_is_not(
    kubernetes: Kubernetes, namespace: str, submit: Submit, tmp_path: Path
) -> None:
    job = submit("echo one; echo two")
    elsewhere = schedulers.find(job.id, Store(tmp_path / "elsewhere"), target="kubernetes")
    assert job.wait(90).state is State.SUCCEEDED
    lines = list(elsewhere.logs())
    assert _text(lines) == "one\ntwo\n"
    for pod in kubernetes.pods(namespace):
        kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}")
    until(lambda: not kubernetes.pods(namespace), "they are gone")
    assert list(elsewhere.logs(since=_cursor(lines))) == []
    (said,) = elsewhere.logs(since=_cursor(lines[:1]))
    assert (said.stream, said.rank) == ("missing", 0)
    assert said.text == "accel: the end of the output of node 0 is missing: its pod is gone\n"
    assert list(elsewhere.logs(since=_cursor([said]))) == []
    (told,) = schedulers.find(job.id, Store(tmp_path / "third"), target="kubernetes").logs()
    assert told.text == "accel: it has no pods (any more), and their logs were not archived\n"
    (told,) = schedulers.find(job.id).logs()  # who waited has read nothing
    assert told.text == "accel: it has no pods (any more), and their logs were not archived\n"


def test_more_logs_than_streams_are_all_followed(submit: Submit, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_TAILS", 1)
    job = submit(_counting(shared), nodes=2, options=_host(shared))
    follower = Follower(job)
    until(lambda: all("line 20\n" in follower.text(rank) for rank in range(2)), "both write")
    (shared / "end").touch()
    follower.ended()
    for rank in range(2):
        _counted(follower.text(rank))


@pytest.mark.parametrize("workload", ["jobset", *long("job")])
def test_pods_that_are_made_anew_are_attempts(
    submit: Submit, shared: Path, workload: str, opened: Streams, tmp_path: Path
) -> None:
    """Where it is not the container that is restarted, but another pod takes the place of the one that failed. A JobSet
    has removed that one: elsewhere than in the archive a line says so."""
    count = shared / "count"
    text = f"""
        run=$(cat {count} 2>/dev/null || echo 0); echo $((run + 1)) > {count}
        n=0; while [ $n -lt 50 ]; do n=$((n + 1)); echo run $run line $n; done
        [ $run -ge 1 ] && exit
        until [ -e {shared}/seen ]; do sleep 0.1; done
        exit 7
    """
    job = submit(text, max_restarts=1, options={"workload": workload, **_host(shared)})
    follower = Follower(job)
    until(lambda: "run 0 line 50" in follower.text(), "the first run is seen: its pod goes when it ends")
    _stream_of(follower.lines[-1], opened)
    (shared / "seen").touch()
    followed = follower.ended()
    assert job.status().state is State.SUCCEEDED
    for run in range(2):
        assert _text(followed, 0, run) == "".join(f"run {run} line {n + 1}\n" for n in range(50))
    # A JobSet's controller deletes the pod as soon as it has failed. A kubelet that cuts the stream with it, before it
    # has said that the log has ended, leaves open whether there was more: a line says that too.
    untold = ["accel: some output of node 0 is missing: it was not read to its end\n"] if workload == "jobset" else []
    assert [line.text for line in followed if line.stream == "missing"] in ([], untold)
    elsewhere = schedulers.find(job.id, Store(tmp_path / "elsewhere"), target="kubernetes")
    missing = ["accel: output of attempt 0 is missing: its pods are gone\n"] if workload == "jobset" else []
    assert [line.text for line in elsewhere.logs() if line.stream == "missing"] == missing


def test_a_log_that_was_rotated_away_is_read_or_reported(submit: Submit, shared: Path) -> None:
    """A kubelet keeps 10 MiB at hand. Whatever else was written is read by who follows, or is reported."""
    later = f"until [ -e {shared}/go ]; do echo later; sleep 0.2; done"
    text = f"yes $(printf %01023d 0) | head -c 12582912; {later}"
    job = submit(text, options=_host(shared))

    def is_rotated() -> bool:
        first = next(job.logs(), None)
        return first is not None and not first.text.startswith("accel launch: ")

    until(is_rotated, "the log begins after the launcher's first line")
    follower = Follower(job)
    (shared / "go").touch()
    for lines in (follower.ended(), list(job.logs())):
        assert len([line for line in lines if line.stream == "output"]) < 12_288
        gaps = [line.text for line in lines if line.stream == "missing"]
        assert gaps == ["accel: some output of node 0 may be missing: its log was rotated before it was read\n"]


def test_a_line_that_the_kubelet_splits_is_one_line_from_every_place(submit: Submit) -> None:
    """Its last part is written seconds after the first, and an answer from then on begins inside the line."""
    part = "printf '%020000d' 0"
    job = submit(f"echo before; {part}; {part}; sleep 2.2; echo; echo after; sleep 1; echo end")
    assert job.wait(90).state is State.SUCCEEDED
    lines = [line for line in job.logs() if line.rank is not None]
    assert [line.text for line in lines] == ["before\n", "0" * 40_000 + "\n", "after\n", "end\n"]
    for number in range(1, len(lines) + 1):
        assert list(job.logs(since=_cursor(lines[:number]))) == lines[number:]


def test_a_node_s_log_is_archived_when_its_pod_is_evicted(
    kubernetes: Kubernetes, namespace: str, submit: Submit, shared: Path, tmp_path: Path
) -> None:
    """Its follower has all of it, once, and misses nothing; elsewhere one line says that it is gone."""
    text = f"trap 'echo goodbye; exit 143' TERM; echo hello; while ! [ -e {shared}/go ]; do sleep 0.05; done; echo done"
    job = submit(text, max_restarts=1, options={"workload": "job", **_host(shared)})
    follower = Follower(job)
    until(lambda: "hello\n" in follower.text(), "it runs")
    (pod,) = (each["metadata"]["name"] for each in kubernetes.pods(namespace))
    kubernetes.displace(namespace, pod)
    again = comes(lambda: follower.text().count("hello\n") == 2, 120)
    assert again, (follower.failure, follower.lines, job.status(), kubernetes.pods(namespace))
    (shared / "go").touch()
    followed = follower.ended()
    assert _text(followed) == "hello\ngoodbye\nhello\ndone\n"
    assert not [line for line in followed if line.stream == "missing"]
    assert _text(list(schedulers.find(job.id).logs())) == _text(followed)
    elsewhere = schedulers.find(job.id, Store(tmp_path / "elsewhere"), target="kubernetes")
    (gone,) = (line.text for line in elsewhere.logs() if line.stream == "missing")
    assert gone == "accel: output of a failed pod is missing: removed by the cluster\n"
