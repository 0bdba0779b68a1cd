"""Checkpoints in a bucket, on an emulator of Google Cloud Storage, from the ranks that leave them to those after."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from accel.checkpoint import manifest
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import MANIFEST
from accel.world import environment
from schedulers import SpecError, State
from schedulers.tpu import api, checkpoints
from schedulers.tpu.checkpoints import Bucket, Save, Uploads, restore
from schedulers.tpu.slice_target import _WITH_CHECKPOINTS
from tests.clusters.tpu import Tpu
from tests.marks import long
from tests.needs import package
from tests.ports import free_port
from tests.waiting import until

from .conftest import CREATED, ROOT, Submit, empty, target_options

URI = "gs://results/run"
TRAIN = """\
import sys, torch
from accel import Accelerator
from accel.plugins import ProjectConfiguration

accelerator = Accelerator(
    cpu=True, project_config=ProjectConfiguration(project_dir="out", automatic_checkpoint_naming=True)
)
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
step = torch.zeros(1)
class Step:
    def state_dict(self): return {"step": step.clone()}
    def load_state_dict(self, state): step.copy_(state["step"])
accelerator.register_for_checkpointing(Step())
try:
    accelerator.load_state("latest")
except Exception as error:
    accelerator.print(f"from the beginning: {str(error)[:40]}")
accelerator.print(f"first step {int(step)}", flush=True)
while step < int(sys.argv[1]):
    loss = model(torch.rand(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    accelerator.save_state()
accelerator.print("result", sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
if len(sys.argv) > 2:
    import time
    time.sleep(3600)
"""


class Store:
    """The emulator, which answers on one address, and what a test looks for in it."""

    def __init__(self, address: str) -> None:
        self._server: Any = package("gcp_storage_emulator.server").create_server(
            address, 0, in_memory=True, default_bucket="results"
        )
        self._server._api.daemon = True
        self._server.start()
        self.url = f"http://{address}:{self._server._api._httpd.server_address[1]}"

    def end(self) -> None:
        self._server.stop()

    def names(self) -> list[str]:
        return sorted(Bucket(URI).sizes())

    def delete(self, *parts: str) -> None:
        """All whose names have these parts."""
        bucket: Any = package("google.cloud.storage").Client().bucket("results")
        for blob in list(bucket.list_blobs()):
            if all(part in blob.name for part in parts):
                blob.delete()

    def whole(self) -> list[str]:
        return sorted(save.path for save in Bucket(URI).complete_saves())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    package("google.cloud.storage")
    made = Store("127.0.0.1")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.url)
    yield made
    made.end()


def saved(place: Path, save: str, text: str = "weights") -> Path:
    """A checkpoint as accel leaves one, of two files."""
    place.mkdir(parents=True)
    (place / "below").mkdir()
    (place / "model").write_text(text)
    (place / "below/state").write_bytes(os.urandom(1000))
    files = {str(p.relative_to(place)): Digest(p.stat().st_size, "0") for p in place.rglob("*") if p.is_file()}
    manifest.write_manifest(place, manifest.Manifest(num_processes=2, save=save, files=files))
    return place


def test_the_names_are_accels() -> None:
    assert (checkpoints.MANIFEST, checkpoints.ROOT) == (MANIFEST, environment.PROJECT_ROOT)


def test_two_hosts_make_a_checkpoint_whole(store: Store, tmp_path: Path) -> None:
    bucket, hosts = Bucket(URI), [Uploads(Bucket(URI), str(tmp_path / f"h{n}"), n, 2) for n in (0, 1)]
    first = saved(tmp_path / "h0/out/checkpoints/checkpoint_0", "aaaaaaaa")
    saved(tmp_path / "h0/out/checkpoints/.checkpoint_1.draft-bbbbbbbb", "bbbbbbbb")
    hosts[0].upload_new()
    assert store.whole() == []
    other = saved(tmp_path / "h1/node-1/out/checkpoints/checkpoint_0", "aaaaaaaa")
    hosts[1].upload_new()
    folder = "out/checkpoints/checkpoint_0/aaaaaaaa"
    assert store.names() == [f"{folder}/node-{n}/{name}" for n in (0, 1) for name in (MANIFEST, "below/state", "model")]
    assert list(bucket.complete_saves()) == [Save("out/checkpoints/checkpoint_0", "aaaaaaaa")]
    for node, was in ((0, first), (1, other)):
        new = tmp_path / f"new{node}"
        assert restore(bucket, str(new), node) == ["out/checkpoints/checkpoint_0"]
        there = new / was.relative_to(tmp_path / f"h{node}")
        assert {p.name: p.read_bytes() for p in there.rglob("*") if p.is_file()} == {
            p.name: p.read_bytes() for p in was.rglob("*") if p.is_file()
        }
        assert restore(bucket, str(new), node) == []  # what a host has stays
    assert restore(bucket, str(tmp_path / "new2"), 2) == ["out/checkpoints/checkpoint_0"]
    assert (tmp_path / "new2/out/checkpoints/checkpoint_0/model").exists()  # of node 0, for a host that is new


def test_the_newest_whole_one_is_restored(store: Store, tmp_path: Path) -> None:
    for number in (9, 10, 11):
        for node, own in ((0, "h0"), (1, "h1/node-1")):
            if (number, node) != (11, 1):  # this host was taken away in the middle
                saved(tmp_path / own / f"out/checkpoint_{number}", f"{number:08x}", str(number))
    for node, own in ((0, "h0"), (1, "h1/node-1")):
        saved(tmp_path / own / "best", "cccccccc")
        Uploads(Bucket(URI), str(tmp_path / f"h{node}"), node, 2).upload_new()
    assert sorted(restore(Bucket(URI), str(tmp_path / "new"), 0)) == ["best", "out/checkpoint_10"]
    assert (tmp_path / "new/out/checkpoint_10/model").read_text() == "10"


def test_a_save_in_the_same_place_is_beside_the_one_before(store: Store, tmp_path: Path) -> None:
    """Until the new one is whole on all hosts, the old one is what is restored."""
    uploads = [Uploads(Bucket(URI), str(tmp_path / f"h{n}"), n, 2) for n in (0, 1)]
    places = [tmp_path / "h0/best", tmp_path / "h1/node-1/best"]
    for save, text in (("aaaaaaaa", "old"), ("bbbbbbbb", "new")):
        for node, place in enumerate(places):
            shutil.rmtree(place, ignore_errors=True)
            saved(place, save, text)
            uploads[node].upload_new()
            if (save, node) == ("bbbbbbbb", 0):
                restore(Bucket(URI), str(tmp_path / "between"), 0)
    restore(Bucket(URI), str(tmp_path / "after"), 0)
    assert [(tmp_path / new / "best/model").read_text() for new in ("between", "after")] == ["old", "new"]


def test_what_was_uploaded_in_part_is_completed_and_only_that(store: Store, tmp_path: Path) -> None:
    saved(tmp_path / "best", "aaaaaaaa")
    Uploads(Bucket(URI), str(tmp_path), 0, 1).upload_new()
    blob: Any = package("google.cloud.storage").Client().bucket("results").get_blob
    before = blob("run/best/aaaaaaaa/node-0/model").generation
    store.delete(MANIFEST)
    store.delete("below/state")
    Uploads(Bucket(URI), str(tmp_path), 0, 1).upload_new()
    assert store.whole() == ["best"]
    assert blob("run/best/aaaaaaaa/node-0/model").generation == before


def test_a_file_that_is_not_whole_is_not_restored(store: Store, tmp_path: Path) -> None:
    place = saved(tmp_path / "h0/best", "aaaaaaaa")
    document = json.loads((place / MANIFEST).read_text())
    document["files"]["model"]["bytes"] += 1
    (place / MANIFEST).write_text(json.dumps(document))
    Uploads(Bucket(URI), str(tmp_path / "h0"), 0, 1).upload_new()
    with pytest.raises(checkpoints.BucketError, match="best/aaaaaaaa/node-0/model does not have the 8 bytes of"):
        restore(Bucket(URI), str(tmp_path / "new"), 0)
    assert not (tmp_path / "new/best").exists()


def test_a_bucket_that_is_not_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = ["launch", "--machine_rank", "0", "--num_machines", "1"]
    monkeypatch.setattr(sys, "argv", ["-c", "gs://nowhere/{id}", *launch])
    monkeypatch.setenv("ACCEL_JOB_ID", "job1")
    monkeypatch.setenv("ACCEL_JOB_DIR", str(tmp_path))
    monkeypatch.setenv(checkpoints.ROOT, str(tmp_path))
    assert checkpoints.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("accel: checkpoints: gs://nowhere/job1: NotFound: ")
    assert said.count("\n") == 1


def gang(tmp_path: Path, name: str, steps: int, uri: str = URI) -> list[tuple[int, str]]:
    """Two hosts of this machine's, with a disk each, train so many steps: their codes and what they printed."""
    package("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    launch = ["--cpu", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    port = str(free_port())
    running = []
    for node in (0, 1):
        flags = [*launch, "--main_process_port", port, "--num_machines", "2", "--machine_rank", str(node)]
        argv = [sys.executable, "-c", _WITH_CHECKPOINTS, uri, "-m", "accel", "launch", *flags, "train.py", str(steps)]
        directory = tmp_path / name / str(node)
        directory.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "ACCEL_JOB_ID": "job1", "ACCEL_JOB_DIR": str(directory),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        running.append(subprocess.Popen(
            argv, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ))  # fmt: skip
    return [(process.wait(), process.communicate()[0]) for process in running]


def result(ended: list[tuple[int, str]]) -> str:
    assert [code for code, _ in ended] == [0, 0], ended
    return ended[0][1].rpartition("result ")[2].split()[0]


@pytest.mark.long  # a preempted job, below, restores in the same way
def test_new_hosts_go_on_to_the_bit(store: Store, tmp_path: Path) -> None:
    """The first hosts are lost while the last checkpoint is on its way: the next ones go on from the one before."""
    whole = result(gang(tmp_path, "whole", 6, "gs://results/whole"))
    result(gang(tmp_path, "first", 4))
    assert store.whole() == [f"out/checkpoints/checkpoint_{number}" for number in range(4)]
    store.delete("run/out/checkpoints/checkpoint_3", "node-1", MANIFEST)
    again = gang(tmp_path, "second", 6)
    assert "checkpoints/checkpoint_2 is restored from gs://results/run" in again[0][1]
    assert "first step 3" in again[0][1]
    assert result(again) == whole
    assert store.whole()[-1] == "out/checkpoints/checkpoint_5"


@pytest.mark.parametrize("uri", ["s3://bucket/a", "gs://", "gs://b", "gs://bucket/a b", "bucket"])
def test_what_is_no_place_for_checkpoints(tpu: Tpu, home: Path, project: Path, uri: str) -> None:
    (project / "train.py").touch()
    with pytest.raises(SpecError, match=r"checkpoint_uri must be like gs://bucket/prefix/{id}, not "):
        schedulers.submit("train.py", target="tpu", cwd=project, options=target_options(tpu, checkpoint_uri=uri))


def test_a_preempted_job_goes_on_on_the_next_slice(
    tpu: Tpu, submit: Submit, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slice is taken away while the last checkpoint is on its way; in the end it has learned the same."""
    package("google.cloud.storage")
    store = Store(tpu.hosts.network.address(0))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    (project / "train.py").write_text(TRAIN)
    text = f"[ $ACCEL_ATTEMPT = 0 ] && more='3 stay' || more=5; exec {sys.executable} train.py $more"

    def begin(text: str, folder: str) -> schedulers.Job:
        env = {"STORAGE_EMULATOR_HOST": store.url, "OMP_NUM_THREADS": "1"}
        return submit(
            text, env=env, options={**CREATED, "spot": True, "checkpoint_uri": f"gs://results/{folder}/{{id}}"}
        )

    try:
        job = begin(text, "run")
        until(lambda: job.status() and len(store.whole()) == 3, "three checkpoints are whole")
        store.delete("/out/checkpoints/checkpoint_2/", "/node-0/", MANIFEST)
        tpu.preempt(f"accel-{job.id}-0")
        ends = [(job, job.wait(180))]
        alone = begin(f"exec {sys.executable} train.py 5", "alone")
        ends.append((alone, alone.wait(180)))
        assert [status.state for _, status in ends] == [State.SUCCEEDED] * 2, (ends, list(job.logs()))
        printed = ["".join(line.text for line in each.logs()) for each, _ in ends]
        assert "first step 2" in printed[0]
        results = [text.rpartition("result ")[2].split()[0] for text in printed]
        assert results[0] == results[1]
    finally:
        store.end()


@pytest.mark.parametrize(("code", "state"), [(7, State.FAILED), *long((85, State.SUCCEEDED))])
def test_how_a_job_ended_that_nobody_looked_after(
    tpu: Tpu, submit: Submit, monkeypatch: pytest.MonkeyPatch, code: int, state: State
) -> None:
    """It is in the bucket when the slice has deleted itself; one that was warned of a preemption (85) goes on."""
    package("google.cloud.storage")
    monkeypatch.setattr(api, "ENDED_S", 2.0)
    store = Store(tpu.hosts.network.address(0))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
    try:
        job = submit(
            f"[ $ACCEL_ATTEMPT = 1 ] || exit {code}", env={"STORAGE_EMULATOR_HOST": store.url},
            options={**CREATED, "checkpoint_uri": "gs://results/run/{id}"},
        )  # fmt: skip
        until(lambda: job.status().message.startswith("starting on "), "it is started", 90)
        empty(tpu)
        assert store.names() == [f"{job.id}/accel-{job.id}-0.json"]
        status = job.wait(120)
        assert (status.state, status.exit_code) == (state, code if state is State.FAILED else 0)
        empty(tpu)
    finally:
        store.end()
