"""Jobs with a slice of their own: from the request for it until nothing of it is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State
from schedulers.errors import SubmitError, Unreachable
from schedulers.jobs import poll
from schedulers.tpu import node_request
from tests.clusters.tpu import LAUNCHER, SERVICE_ACCOUNT, Tpu
from tests.waiting import until

from .conftest import Submit

CREATED: dict[str, Any] = {"name": None, "accelerator_type": "v4-16", "version": "tpu-ubuntu2204-base"}
FOREVER = "echo up; while true; do sleep 0.1; done"


def printed(job: Job) -> list[tuple[int | None, str]]:
    return sorted((line.rank, line.text) for line in job.logs() if line.rank is not None)


def runs(job: Job) -> None:
    """Polls as `accel wait` does, until a rank has printed."""
    until(lambda: job.status().state is State.RUNNING and (0, "up\n") in printed(job), "the job runs", 90)


def empty(tpu: Tpu) -> None:
    until(lambda: not tpu.nodes() and not tpu.queued(), f"no slice is left: {tpu.nodes()} {tpu.queued()}", 90)


def deleted_by(tpu: Tpu) -> set[str]:
    return {call.caller for method in ("DeleteNode", "DeleteQueuedResource") for call in tpu.calls(method)}


@pytest.fixture
def create(submit: Submit) -> Submit:
    """Submits the text of a shell script to a slice of two hosts that is created for it."""

    def create(text: str, **given: Any) -> Job:
        return submit(text, options={**CREATED, **given.pop("options", {})}, **given)

    return create


def test_a_slice_is_created_and_deleted(tpu: Tpu, create: Submit, project: Path) -> None:
    tpu.hold("CreateNode")
    job = create('echo "$RANK of $WORLD_SIZE on $(hostname)"; exit 7')
    assert job.native_id == f"accel-{job.id}/{job.id}"
    status = job.status()
    assert (status.state, status.message) == (State.QUEUED, f"accel-{job.id}-0 is CREATING")
    (project / "job.sh").write_text("echo something else\n")
    tpu.resume()
    assert job.wait(120).exit_code == 7, list(job.logs())
    empty(tpu)
    workers = [f"node{n}" for n in (1, 2)]
    assert printed(job) == [(rank, f"{rank} of 2 on {workers[rank]}\n") for rank in (0, 1)]
    assert [line.text for line in job.logs(tail=1, ranks=[0])] == [f"0 of 2 on {workers[0]}\n"]
    assert deleted_by(tpu) == {LAUNCHER}
    (call,) = tpu.calls("CreateNode")
    assert call.request["node"]["labels"] == {"accel-job": job.id}


@pytest.mark.parametrize("queued", [False, True])
def test_cancelled_before_it_runs(tpu: Tpu, create: Submit, queued: bool) -> None:
    tpu.capacity(False)
    if not queued:
        tpu.hold("CreateNode")
    job = create("true", options={"queued": queued, "spot": queued})
    assert job.status().state is State.QUEUED
    assert job.cancel().state is State.CANCELLED
    empty(tpu)
    assert not list(job.logs())


def test_cancelled_while_it_runs(tpu: Tpu, create: Submit) -> None:
    job = create(FOREVER, options={"queued": True})
    runs(job)
    assert job.cancel().state is State.CANCELLED
    empty(tpu)
    assert (0, "up\n") in printed(job)


def test_without_capacity_it_is_asked_for_again(tpu: Tpu, create: Submit) -> None:
    tpu.capacity(False)
    job = create("true")
    until(lambda: job.status().reason is Reason.NO_CAPACITY, "there is no capacity")
    assert job.status().state is State.QUEUED
    tpu.capacity(True)
    assert job.wait(120).state is State.SUCCEEDED
    assert len(tpu.calls("CreateNode")) == 2
    empty(tpu)


def test_what_the_api_refuses_is_not_asked_for_again(tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    tpu.quota(False)
    with pytest.raises(SubmitError, match=r"^target tpu: Quota limit 'TPUV4PerProjectPerZoneForTPUAPI' .*exceeded"):
        create("true")
    status = schedulers.list_jobs()[0].status  # type: ignore[union-attr]
    assert (status.state, status.reason) == (State.FAILED, Reason.NO_CAPACITY)
    with pytest.raises(SubmitError, match=r"^target tpu: tpu.nodes.create: .* accelerator v4-12 was not found"):
        create("true", options={"accelerator_type": "v4-12"})
    tpu.deny("CreateNode")
    with pytest.raises(SubmitError, match=r"^target tpu: Google Cloud does not allow tpu.nodes.create: "):
        create("true")
    assert len(tpu.calls("CreateNode")) == 3
    tpu.down()
    with pytest.raises(Unreachable, match=r"cannot be reached: .*is kept as submitting"):
        create("true")
    tpu.up()
    tpu.allow("CreateNode")
    tpu.quota(True)
    monkeypatch.setattr(poll, "ABANDONED_S", 0.0)  # this process has given up the submit
    job = schedulers.find("@last")
    assert job.wait(90).state is State.SUCCEEDED
    empty(tpu)


@pytest.mark.parametrize(
    ("which", "options", "text"),
    [("ENDED_S", {}, "true"), ("ARRIVE_S", {"queued": True, "start_timeout_s": 1}, ""), ("SILENT_S", {}, FOREVER)],
)
def test_without_a_client_the_slice_deletes_itself(
    tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch, which: str, options: dict[str, Any], text: str
) -> None:
    """Its own service account is the only one that may."""
    monkeypatch.setattr(node_request, which, 3.0)
    tpu.deny("DeleteNode", "DeleteQueuedResource", caller=LAUNCHER)
    job = create(text, options=options)
    if text:
        until(lambda: job.status().message.startswith("starting on "), "it is started", 90)
    if which == "SILENT_S":
        runs(job)
        host = tpu.hosts[tpu.workers(f"accel-{job.id}-0")[0]]
        host.run("pkill", "-STOP", "-f", "supervisor.pyz")
    empty(tpu)
    assert deleted_by(tpu) == {SERVICE_ACCOUNT}
    if text:
        status = job.status()
        assert (status.state, status.reason) == (State.FAILED, Reason.LOST)
        assert "deleted" in status.message or "is gone before" in status.message


def test_preempted_and_started_on_the_next_slice(tpu: Tpu, create: Submit) -> None:
    job = create(
        'echo "up $ACCEL_ATTEMPT"; [ $ACCEL_ATTEMPT = 1 ] || sleep 1000', options={"spot": True, "queued": True}
    )
    until(lambda: (0, "up 0\n") in printed(job) or job.status() is None, "the job runs", 90)
    tpu.preempt(f"accel-{job.id}-0")
    until(lambda: job.status().attempt == 1, "the next slice is asked for", 90)
    status = job.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    assert printed(job) == [(0, "up 1\n"), (1, "up 1\n")]
    empty(tpu)


def test_a_slice_is_kept_until_it_is_pruned(tpu: Tpu, create: Submit) -> None:
    job = create("true", options={"keep": True})
    status = job.wait(90)
    assert status.state is State.SUCCEEDED
    assert status.message.startswith(f"slice accel-{job.id}-0 is up since {time.strftime('%Y')}")
    (node,) = tpu.nodes()
    assert "startup-script" not in node["metadata"]
    from schedulers.jobs.prune import prune
    from schedulers.store.store import Store

    assert prune(Store.default(), ids=[job.id]).ids == (job.id,)
    empty(tpu)
