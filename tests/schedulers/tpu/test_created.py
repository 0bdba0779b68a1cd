"""Jobs with a slice of their own: from the request for it until nothing of it is left."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import schedulers
from accel.cli import main
from schedulers import Job, Reason, State
from schedulers.config.named_targets import load_target
from schedulers.errors import SubmitError, Unreachable
from schedulers.hosts.jobs import submit as hosts_submit
from schedulers.jobs import poll
from schedulers.tpu import api
from schedulers.tpu.slice_target import SliceTarget
from tests import needs
from tests.clusters.tpu import LAUNCHER, PROJECT, SERVICE_ACCOUNT, ZONE, Tpu
from tests.marks import long
from tests.waiting import until

from .conftest import CREATED, Submit, deleted_by, empty, printed, runs, target_options
from .test_jobs import WARNED

FOREVER = "echo up; while true; do sleep 0.1; done"


@pytest.fixture
def create(submit: Submit) -> Submit:
    """Submits the text of a shell script to a slice of two hosts that is created for it."""

    def create(text: str, **given: Any) -> Job:
        return submit(text, options={**CREATED, **given.pop("options", {})}, **given)

    return create


def test_a_slice_is_created_and_deleted(tpu: Tpu, create: Submit, project: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    tpu.hold("CreateNode")
    # Which rank fails first is left to chance; none may before both have written, since the other is then ended.
    written = f"touch {shared}/$RANK; until [ -e {shared}/0 ] && [ -e {shared}/1 ]; do sleep 0.1; done"
    job = create(f'echo "$RANK of $WORLD_SIZE on $(hostname)"; {written}; exit 7')
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


def test_a_slice_stays_where_it_was_requested(tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment comes to name another project: the slice is looked for, and deleted, in its own."""
    tpu.hold("CreateNode")
    job = create("true")
    assert job.record.backend == f"project={PROJECT}/{ZONE}"
    monkeypatch.setenv("CLOUDSDK_CORE_PROJECT", "another-project")
    assert Job(job.record).status().message == f"accel-{job.id}-0 is CREATING"
    tpu.resume()
    assert Job(job.record).wait(120).state is State.SUCCEEDED
    empty(tpu)


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


def test_cancelled_while_it_runs(tpu: Tpu, create: Submit, tmp_path: Path) -> None:
    job = create(FOREVER, options={"queued": True})
    runs(job)
    there = {"name": f"accel-{job.id}-0", "accelerator_type": None, "version": None}
    found = load_target("tpu", tmp_path / "other/jobs", overrides={**target_options(tpu), **there}).find(job.id)  # type: ignore[attr-defined]
    assert found.native_id == f"accel-{job.id}-0-w0,accel-{job.id}-0-w1/{job.id}"  # on any machine
    assert job.cancel().state is State.CANCELLED
    empty(tpu)
    assert (0, "up\n") in printed(job)


def test_without_capacity_it_is_asked_for_again(tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedulers.tpu.target._RETRY_PAUSES_S", (0.5, 0.5))
    tpu.capacity(False)
    job = create("true")
    until(lambda: job.status().reason is Reason.NO_CAPACITY, "there is no capacity")
    assert job.status().state is State.QUEUED
    tpu.capacity(True)
    assert job.wait(120).state is State.SUCCEEDED
    assert len(tpu.calls("CreateNode")) >= 2
    empty(tpu)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("INTERNAL", State.SUCCEEDED), ("INVALID_ARGUMENT", State.FAILED), *long(("UNAVAILABLE", State.SUCCEEDED))],
)
def test_a_creation_that_fails_later(
    tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch, code: str, expected: State
) -> None:
    """A slice is requested again if its creation failed for a reason that may pass. No node is left."""
    monkeypatch.setattr("schedulers.tpu.target._RETRY_PAUSES_S", (0.5, 0.5))
    tpu.fail("provision", code, "It broke.")
    job = create("true")
    status = job.wait(120)
    assert status.state is expected, status
    assert len(tpu.calls("CreateNode")) == (2 if expected is State.SUCCEEDED else 1)
    if expected is State.FAILED:
        assert (status.reason, status.message) == (Reason.SETUP, "target tpu: It broke.")
    empty(tpu)


def test_a_slice_that_is_still_created_when_the_time_is_over(tpu: Tpu, create: Submit) -> None:
    tpu.hold("CreateNode")
    job = create("true", options={"valid_until_duration": "1s"})
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.NO_CAPACITY), status
    assert status.message == f"no capacity for accel-{job.id}-0 within 1s"
    empty(tpu)


@pytest.mark.parametrize("moment", ["wait_reachable", *long("ship", "start")])
def test_preempted_before_the_job_runs(tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The job runs on the next slice."""
    owner: Any = SliceTarget if moment == "wait_reachable" else hosts_submit
    step = getattr(owner, moment)
    called: list[None] = []

    def preempted_at(*args: Any, **given: Any) -> Any:
        called.append(None)
        if len(called) > 1:
            return step(*args, **given)
        if moment == "wait_reachable":
            step(*args, **given)
        tpu.preempt(f"accel-{job.id}-0")
        return None if moment == "wait_reachable" else step(*args, **given)

    monkeypatch.setattr(owner, moment, preempted_at)
    job = create('[ $ACCEL_ATTEMPT = 1 ] && echo "up"', options={"spot": True})
    status = job.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    empty(tpu)


def test_slices_of_other_machines(
    tpu: Tpu, create: Submit, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A queued resource without a node is one; `prune` deletes all of a job's, and says which it could not."""
    tpu.capacity(False)
    job = create("true", options={"queued": True})
    assert job.status().state is State.QUEUED
    (project / "accel.yaml").write_text(
        f"targets:\n  pod: {{kind: tpu, zone: {tpu.zone}, accelerator_type: v4-16, version: tpu-ubuntu2204-base}}\n"
    )
    monkeypatch.chdir(project)
    home = job.record.directory.parent.parent
    monkeypatch.setenv("ACCEL_HOME", str(project / "elsewhere"))
    assert main(["targets", "check", "pod"]) == 0
    shown = capsys.readouterr()
    assert f"accel-{job.id}-0\tWAITING_FOR_RESOURCES\tv4-16\t{job.id}\n" in shown.out
    assert f"accel-{job.id}-0: job {job.id} is not known here" in shown.err
    assert main(["list", "--target", "pod"]) == 0
    assert re.search(rf"^{job.id}\taccel-{job.id}-0\tqueued\tpod\t2\t", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("ACCEL_HOME", str(home))
    assert main(["prune", "--force", job.id]) == 0  # the record only: what runs stays
    assert tpu.queued()
    target: Any = load_target("tpu", home / "jobs", overrides={**CREATED, "zone": tpu.zone})
    tpu.deny("DeleteQueuedResource")
    (line,) = target.clear({job.id: None})
    assert line.startswith(f"slice accel-{job.id}-0 stays: target tpu: Google Cloud does not allow tpu.queuedResources")
    tpu.allow("DeleteQueuedResource")
    assert target.clear({job.id: None}) == []
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
    [
        ("ARRIVE_S", {"queued": True, "start_timeout_s": 1}, ""),
        *long(("ENDED_S", {}, "true"), ("SILENT_S", {}, FOREVER)),
    ],
)
def test_without_a_client_the_slice_deletes_itself(
    tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch, which: str, options: dict[str, Any], text: str
) -> None:
    """Its own service account is the only one that may."""
    monkeypatch.setattr(api, which, 3.0)
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


def test_what_was_warned_of_maintenance_goes_on_on_the_next_slice(tpu: Tpu, create: Submit, tmp_path: Path) -> None:
    warned = f"exec {sys.executable} -c '{WARNED}' {tmp_path}/saved"
    job = create(f"[ $ACCEL_ATTEMPT = 0 ] || exit 0; {warned}")
    until(lambda: job.status() and [text for _, text in printed(job)].count("up\n") == 2, "both take warnings", 90)
    tpu.maintenance(f"accel-{job.id}-0")
    status = job.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    assert (tmp_path / "saved").is_dir()
    empty(tpu)


@pytest.mark.long
def test_ranks_that_leave_every_slice(tpu: Tpu, create: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedulers.tpu.target._MAX_MOVES", 1)
    job = create("exit 85")
    status = job.wait(120)
    assert (status.state, status.reason, status.attempt) == (State.FAILED, Reason.PREEMPTED, 1), status
    assert status.message == "the ranks have left 2 slices after preemption warnings"
    empty(tpu)


@pytest.mark.long  # test_checkpoints.py has a job that is preempted in any run
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


@pytest.mark.parametrize(("queued", "quota"), [(True, True), (True, False), (False, True)])
def test_no_slice_in_time(tpu: Tpu, create: Submit, queued: bool, quota: bool) -> None:
    tpu.capacity(False)
    tpu.quota(quota)
    job = create("true", options={"queued": queued, "valid_until_duration": "1s" if quota else "1d"})
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.NO_CAPACITY), status
    empty(tpu)


@pytest.mark.long
def test_of_many_clients_one_creates_the_next_slice(tpu: Tpu, create: Submit) -> None:
    job = create(FOREVER, options={"spot": True})
    runs(job)
    tpu.preempt(f"accel-{job.id}-0")
    with ThreadPoolExecutor() as pool:
        states = [status.state for status in pool.map(lambda _: schedulers.find(job.id).status(), range(8))]
    assert set(states) <= {State.RUNNING, State.QUEUED}
    runs(job)
    assert [call.request["nodeId"] for call in tpu.calls("CreateNode")] == [f"accel-{job.id}-0", f"accel-{job.id}-1"]
    assert job.cancel().state is State.CANCELLED
    empty(tpu)


@pytest.mark.long
def test_hosts_that_notice_a_preemption_before_the_api_does(tpu: Tpu, create: Submit) -> None:
    """Of two hosts the one that is left says node_failure."""
    job = create('echo "up"; [ $ACCEL_ATTEMPT = 1 ] || sleep 1000', options={"spot": True})
    runs(job)
    tpu.crash(f"accel-{job.id}-0", 0)
    until(lambda: job.status().message.endswith("was it preempted?"), "the other host has noticed", 90)
    tpu.preempt(f"accel-{job.id}-0")
    assert job.wait(120).state is State.SUCCEEDED
    assert [node["name"] for node in tpu.nodes()] in ([], [f"{tpu.parent}/nodes/accel-{job.id}-1"])
    empty(tpu)


def test_a_slice_is_kept_until_its_job_is_pruned(
    tpu: Tpu, create: Submit, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = create("true", options={"keep": True})
    assert job.wait(90).state is State.SUCCEEDED
    (node,) = tpu.nodes()
    assert "startup-script" not in node["metadata"]
    name = f"accel-{job.id}-0"
    assert main(["list"]) == 0
    message = rf"slice {name} is up since {time.strftime('%Y')}-.* UTC \(keep: accel prune deletes it\)"
    assert re.search(message, capsys.readouterr().out)
    with tpu.client() as client:  # that of another machine
        other = {"accelerator_type": "v4-8", "runtime_version": "tpu-ubuntu2204-base", "labels": {"accel-job": "2mx"}}
        client.create_node(parent=tpu.parent, node_id="accel-2mx-1", node=other).result()
    (project / "accel.yaml").write_text(
        f"targets:\n  pod: {{kind: tpu, zone: {tpu.zone}, accelerator_type: v4-16, version: tpu-ubuntu2204-base}}\n"
    )
    monkeypatch.chdir(project)
    assert main(["targets", "check", "pod"]) == 0
    shown = capsys.readouterr()
    assert f"{name}\tREADY\tv4-16\t{job.id}\n" in shown.out
    assert "accel-2mx-1\tREADY\tv4-8\t2mx\n" in shown.out
    assert "accel: warning: accel-2mx-1: job 2mx is not known here" in shown.err
    assert main(["prune", job.id]) == 0
    until(lambda: [node["name"] for node in tpu.nodes()] == [f"{tpu.parent}/nodes/accel-2mx-1"], "the slice is deleted")


@pytest.mark.long
def test_gcloud_and_accel_see_and_delete_each_others_slices(tpu: Tpu, create: Submit) -> None:
    needs.gcloud()

    def gcloud(words: str, *more: str) -> str:
        argv = ["gcloud", "compute", "tpus", *words.split(), *more]
        done = subprocess.run(argv, env=tpu.gcloud_env(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = create(FOREVER, options={"queued": True, "spot": True})
    runs(job)
    name = f"accel-{job.id}-0"
    assert gcloud("tpu-vm list --format", "value(name.basename(),state,labels.accel-job)").split() == [
        name, "READY", job.id
    ]  # fmt: skip
    assert gcloud("queued-resources list --format", "value(name.basename(),state.state)").split() == [name, "ACTIVE"]
    gcloud(f"queued-resources delete {name} --force --quiet --async")
    empty(tpu)
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST), status
    gcloud("tpu-vm create pod1 --async --accelerator-type=v4-16 --version=tpu-ubuntu2204-base")
    tpu.wait("pod1", "READY")
    assert create("true", options={"name": "pod1", "accelerator_type": None, "version": None}).wait(90).exit_code == 0
    gcloud(
        "tpu-vm create accel-2mx-0 --async --accelerator-type=v4-8 --version=tpu-ubuntu2204-base --labels=accel-job=2mx"
    )
    tpu.wait("accel-2mx-0", "READY")
    target: Any = load_target("tpu", job.record.directory.parent, overrides={**CREATED, "zone": tpu.zone})
    assert target.clear({"2mx": None}) == []
    until(lambda: [node["name"] for node in tpu.nodes()] == [f"{tpu.parent}/nodes/pod1"], "accel has deleted it")
