"""A cancel takes the pods away, and leaves what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedulers
from schedulers import Cursor, Job, LogLine, State
from schedulers.kubernetes.client.api import Api
from schedulers.kubernetes.logs import archive
from schedulers.kubernetes.native_id import Native
from schedulers.kubernetes.options import KubernetesOptions
from tests.clusters.kubernetes import Kubernetes
from tests.waiting import until

from ..conftest import Submit

_SAYS_GOODBYE = (
    "trap 'echo goodbye; sleep 0.3; printf really; exit 0' TERM; echo hello $RANK; while :; do sleep 0.05; done"
)


def _text(lines: list[LogLine], rank: int = 0) -> str:
    return "".join(line.text for line in lines if line.rank == rank and line.stream == "output")


def _runs(job: Job, ranks: int = 1) -> None:
    until(lambda: all(f"hello {rank}\n" in _text(list(job.logs()), rank) for rank in range(ranks)), "it runs")


def test_what_a_job_wrote_is_there_after_its_cancel_with_what_it_wrote_in_its_grace(
    kubernetes: Kubernetes, namespace: str, submit: Submit
) -> None:
    job = submit(_SAYS_GOODBYE, nodes=2, grace_s=10.0)
    _runs(job, ranks=2)
    before = list(job.logs())
    assert job.cancel().state is State.CANCELLED
    until(lambda: not kubernetes.pods(namespace), "its pods are gone")
    lines = list(job.logs())
    for rank in range(2):
        assert _text(lines, rank).startswith(f"hello {rank}\ngoodbye\nreally")
    assert not [line for line in lines if line.stream == "missing"]
    # Cursors of before go on in what was kept, and another process reads the same.
    cursor = Cursor()
    for line in before:
        cursor.advance(line)
    assert sorted(map(str, [*before, *job.logs(since=cursor)])) == sorted(map(str, lines))
    assert list(schedulers.find(job.id).logs()) == lines


def test_ranks_of_one_pod_are_kept_apart(submit: Submit) -> None:
    job = submit(_SAYS_GOODBYE, procs_per_node=2, grace_s=10.0)
    _runs(job, ranks=2)
    job.cancel()
    lines = list(job.logs())
    for rank in range(2):
        assert _text(lines, rank) == f"hello {rank}\ngoodbye\nreally\n"


def test_a_second_cancel_keeps_nothing_twice(submit: Submit) -> None:
    job = submit(_SAYS_GOODBYE, grace_s=10.0)
    _runs(job)
    job.cancel(wait=False)
    job.cancel()
    text = _text(list(job.logs()))
    assert text == "hello 0\ngoodbye\nreally"


def test_a_cancel_goes_on_where_nothing_can_be_kept(
    kubernetes: Kubernetes, namespace: str, submit: Submit, caplog: pytest.LogCaptureFixture
) -> None:
    job = submit(_SAYS_GOODBYE)
    _runs(job)
    Path(job.record.path, "logs").rmdir() if Path(job.record.path, "logs").exists() else None
    Path(job.record.path, "logs").write_text("in the way")
    assert job.cancel().state is State.CANCELLED
    assert "logs were not archived" in caplog.text
    until(lambda: not kubernetes.pods(namespace), "its pods are gone")


@pytest.mark.alone
def test_without_an_api_server_it_is_a_line(kubernetes: Kubernetes, tmp_path: Path) -> None:
    api = Api(KubernetesOptions(), "k")
    kubernetes.stop_api()
    said = archive.archive_job(api, Native("pytorchjob", "default", "x-1", "1"), tmp_path)
    assert said is not None
    assert said.startswith("the job's logs were not archived: target k: the API server")


def test_a_log_that_is_too_long_is_kept_in_part_and_says_so(
    kubernetes: Kubernetes, namespace: str, submit: Submit, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(archive, "_MAX_BYTES", 1000)
    job = submit("n=0; while [ $n -lt 500 ]; do n=$((n + 1)); echo line $n; done; echo hello 0; sleep 600")
    _runs(job)
    job.cancel()
    until(lambda: not kubernetes.pods(namespace), "its pods are gone")
    lines = list(job.logs())
    assert _text(lines).startswith("line 1\nline 2\n")
    assert "hello" not in _text(lines)
    (said,) = [line.text for line in lines if line.stream == "missing"]
    assert said == "accel: some output of node 0 is missing: at most 0 MiB of it are archived\n"
    assert "some of the job's logs were not archived: at most 0 MiB" in caplog.text
