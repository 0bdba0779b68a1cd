"""Jobs on a slice, from the submit to their end, whatever becomes of the slice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, SpecError, State
from schedulers.config.named_targets import load_target
from schedulers.errors import ConfigError, SubmitError, Unreachable
from schedulers.hosts.checks import Finding
from schedulers.hosts.preflight import examine
from tests import needs
from tests.clusters.netns import call
from tests.clusters.tpu import ZONE, Tpu
from tests.marks import long
from tests.waiting import until

from .conftest import ROOT, Submit, make_slice, target_options

STANDINS = ROOT / "tests/standins"
FOREVER = "echo up; while true; do sleep 0.1; done"


def printed(job: Job) -> list[tuple[int | None, str]]:
    return [(line.rank, line.text) for line in job.logs() if line.rank is not None]


def runs(job: Job) -> None:
    until(lambda: any(text == "up\n" for _, text in printed(job)), "a rank runs")


@pytest.mark.long  # test_checkpoints.py has a training on two hosts in any run
def test_digits_on_a_slice_of_four_hosts(tpu: Tpu, home: Path) -> None:
    """--nodes is not said: the job has all hosts, in the order of the workers."""
    make_slice(tpu, "pod1", "v4-32")
    job = schedulers.submit(
        "train.py", ["--epochs", "2"], target="tpu", procs_per_node=1, code=ROOT / "examples/digits",
        cwd=ROOT / "examples/digits", options=target_options(tpu),
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    status = job.wait(240)
    assert status.state is State.SUCCEEDED, (status, list(job.logs()))
    lines = [text for _, text in printed(job)]
    assert any("training on 1437 scans, 4 process(es)" in line for line in lines), lines
    assert str(job.native_id) == f"pod1-w0,pod1-w1,pod1-w2,pod1-w3/{job.id}"


def test_ranks_are_the_workers_in_their_order(tpu: Tpu, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the examination doubts of the first one."""

    def doubting(*args: Any, **given: Any) -> Any:
        report = examine(*args, **given)
        return replace(
            report, findings=(*report.findings, Finding.warns("pod1-w0", "reach", "pod1-w1 does not reach it"))
        )

    monkeypatch.setattr("schedulers.hosts.jobs.placement.examine", doubting)
    job = submit('echo "$RANK of $WORLD_SIZE on $NAME"', options={"prologue": ["export NAME=$(hostname)"]})
    assert job.wait(90).state is State.SUCCEEDED, list(job.logs())
    workers = tpu.workers("pod1")
    assert sorted(printed(job)) == [(rank, f"{rank} of 2 on {workers[rank]}\n") for rank in (0, 1)]
    with pytest.raises(SpecError, match=r"--nodes 3: pod1 has 2 hosts; leave it out"):
        submit("true", nodes=3)
    assert submit("exit 7", nodes=2).wait(90).exit_code == 7


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has stand-ins of both runtimes."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STANDINS} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_torch_tpu_has_a_rank_a_chip(tpu: Tpu, submit: Submit, python: str) -> None:
    """The hosts' metadata says which of them is which, and the slice's topology; their chips are said."""
    names = ("RANK", "WORLD_SIZE", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
    job = submit(
        "echo " + " ".join(f"${name}" for name in names), procs_per_node=None,
        options={"cpu": False, "python": python},
        env={"PYTHONPATH": f"{ROOT}:{STANDINS}", "TORCH_TPU_DEVICES_PER_HOST": "2"},
    )  # fmt: skip
    assert job.wait(90).state is State.SUCCEEDED, list(job.logs())
    (node,) = tpu.nodes()
    hosts = [end["ipAddress"] for end in node["networkEndpoints"]]
    addresses = ",".join(f"{host}:{port}" for host in hosts for port in (8070, 8071))
    assert sorted(printed(job)) == [(rank, f"{rank} 4 {addresses} 2,2,2\n") for rank in range(4)]


def test_torch_xla_has_a_process_a_host(tpu: Tpu, home: Path, project: Path, python: str) -> None:
    text = "import os\ndef go():\n    print('core', os.environ['PJRT_LOCAL_PROCESS_RANK'])\n"
    (project / "train.py").write_text(text)
    make_slice(tpu, "pod1")
    options = {"cpu": False, "python": python, "runtime": "torch_xla", "main_training_function": "go"}
    job = schedulers.submit(
        "train.py", target="tpu", cwd=project, options=target_options(tpu, **options),
        env={"PYTHONPATH": f"{ROOT}:{STANDINS}", "STANDIN_DEVICES": "2"},
    )  # fmt: skip
    assert job.wait(90).state is State.SUCCEEDED, list(job.logs())
    assert sorted(printed(job)) == [(host, f"core {core}\n") for host in (0, 1) for core in (0, 1)]


def test_hosts_without_the_runtime_are_named(tpu: Tpu, submit: Submit) -> None:
    with pytest.raises(SubmitError, match=r"pod1-w0: no torch_tpu for .*; run there: .* -m pip install torch_tpu"):
        submit("true", options={"cpu": False})


def test_another_machine_finds_and_cancels_the_job(
    tpu: Tpu, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(FOREVER)
    runs(job)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "other"))
    found = load_target("tpu", tmp_path / "other/jobs", overrides=target_options(tpu)).find(job.id)  # type: ignore[attr-defined]
    assert found is not None
    assert found.native_id == job.native_id
    monkeypatch.undo()
    for name, value in tpu.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    job.cancel()
    assert job.wait(60).state is State.CANCELLED


@pytest.mark.parametrize(
    ("state", "reason"),
    long(("PREEMPTED", Reason.PREEMPTED), ("STOPPED", Reason.NODE_FAILURE), ("", Reason.NODE_FAILURE)),
)
def test_a_job_ends_with_its_slice(tpu: Tpu, submit: Submit, state: str, reason: Reason) -> None:
    make_slice(tpu, "pod1", scheduling_config={"spot": True})
    job = submit(FOREVER)
    runs(job)
    tpu.set_state("pod1", "REPAIRING")
    for host in tpu.workers("pod1"):
        tpu.hosts[host].kill()
    assert not job.status().state.final  # the hosts may be only out of reach
    with pytest.raises(Unreachable):
        job.cancel()
    if state == "PREEMPTED":
        tpu.set_state("pod1", "READY")
        tpu.preempt("pod1")
    elif state:
        tpu.set_state("pod1", state)
    else:
        with tpu.client() as client:
            client.delete_node(name=f"{tpu.parent}/nodes/pod1").result()
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, reason), status
    assert status.message.startswith("the slice pod1 ")


def test_a_slice_of_that_name_that_came_later_has_other_keys(tpu: Tpu, submit: Submit) -> None:
    assert submit("true").wait(90).state is State.SUCCEEDED
    with tpu.client() as client:
        client.delete_node(name=f"{tpu.parent}/nodes/pod1").result()
    make_slice(tpu, "pod1")
    assert submit("true").wait(90).state is State.SUCCEEDED


def test_a_key_that_no_worker_knows_is_given_to_them(tpu: Tpu, submit: Submit, tmp_path: Path, home: Path) -> None:
    make_slice(tpu, "pod1", metadata={"ssh-keys": "somebody:ssh-ed25519 AAAA somebody", "other": "stays"})
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "mine")
    config = tmp_path / "config"
    config.write_text(f"Host *\n  User root\n  IdentityFile {tmp_path / 'mine'}\n  IdentitiesOnly yes\n")
    job = submit("true", options={"ssh_config": str(config)})
    assert job.wait(90).state is State.SUCCEEDED
    (node,) = tpu.nodes()
    key = (tmp_path / "mine.pub").read_text().strip()
    assert node["metadata"] == {"ssh-keys": f"somebody:ssh-ed25519 AAAA somebody\nroot:{key}", "other": "stays"}
    asked = len(tpu.calls("UpdateNode"))
    assert submit("true", options={"ssh_config": str(config)}).wait(90).state is State.SUCCEEDED
    assert len(tpu.calls("UpdateNode")) == asked


def test_what_the_api_refuses(tpu: Tpu, submit: Submit) -> None:
    make_slice(tpu, "pod1")
    with pytest.raises(SubmitError, match=rf"^target tpu: TPU VM not found: pod2 in {ZONE}$"):
        submit("true", options={"name": "pod2"})
    tpu.host_keys(False)
    with pytest.raises(ConfigError, match=r"no host key of worker 0 of pod1 .* set transport: gcloud"):
        submit("true")
    tpu.deny("GetNode")
    with pytest.raises(schedulers.SchedulerError, match=r"Google Cloud does not allow tpu.nodes.get: "):
        submit("true")
    tpu.down()
    with pytest.raises(Unreachable, match=r"^target tpu: Google Cloud cannot be reached: "):
        submit("true")


def test_no_credentials(tpu: Tpu, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(ConfigError, match=r"no Google Cloud credentials: .*; gcloud auth application-default login"):
        submit("true")


def test_as_gcloud_goes(tpu: Tpu, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without host keys in the API: gcloud has its own, and its own key."""
    needs.gcloud()
    for name, value in tpu.gcloud_env().items():
        monkeypatch.setenv(name, value)
    make_slice(tpu, "pod1")
    tpu.host_keys(False)
    (tmp_path / "config").touch()
    job = submit("echo here", options={"transport": "gcloud", "ssh_config": str(tmp_path / "config")})
    assert job.wait(90).state is State.SUCCEEDED, list(job.logs())
    assert sorted(printed(job)) == [(0, "here\n"), (1, "here\n")]


def test_a_launch_by_the_target_s_transport(
    tpu: Tpu, home: Path, project: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker finds the others by its metadata server."""
    make_slice(tpu, "pod1")
    (project / "accel.yaml").write_text(
        f"targets:\n  pod:\n    kind: tpu\n    zone: {ZONE}\n    name: pod1\n    ssh_config: {tpu.hosts.config}\n"
        f"    python: {python}\n"
    )
    (project / "c.yaml").write_text(
        "distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod\ntpu_env: [TORCH_TPU_DEVICES_PER_HOST=1]\n"
    )
    script = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1])\n"
    (project / "train.py").write_text(script)
    argv = [sys.executable, "-m", "accel", "launch", "--config_file", "c.yaml", "--tpu_runtime", "torch_tpu"]
    done = subprocess.run(
        [*argv, str(project / "train.py"), "a  b"], cwd=project, env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker 0] 0 2 a  b", "[worker 1] 1 2 a  b"]


def test_commands_by_the_target_s_transport(
    tpu: Tpu, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_slice(tpu, "pod1")
    (project / "accel.yaml").write_text(
        f"targets:\n  pod:\n    kind: tpu\n    zone: {ZONE}\n    name: pod1\n    ssh_config: {tpu.hosts.config}\n"
    )
    argv = [sys.executable, "-m", "accel", "tpu-config", "--tpu_name", "pod", "--command"]
    where = {"cwd": project, "env": dict(os.environ) | {"PYTHONPATH": str(ROOT)}}
    done = subprocess.run([*argv, "hostname", "echo 'a  b'"], capture_output=True, text=True, timeout=90, **where)  # type: ignore[call-overload]
    workers = tpu.workers("pod1")
    expected = [line for n in (0, 1) for line in (f"[worker {n}] {workers[n]}", f"[worker {n}] a  b")]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr
    failing = f"[ $(hostname) = {workers[1]} ] && exit 7; sleep 300"
    done = subprocess.run([*argv, failing], capture_output=True, text=True, timeout=90, **where)  # type: ignore[call-overload]
    assert done.returncode == 7, done.stderr
    assert done.stderr.splitlines()[-1] == "accel: worker 1 ended with code 7; ending the other 1"


WARNED = """\
import sys, time
from accel import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.preempted
print("up", flush=True)
while True:
    accelerator.checkpoint_on_preemption(sys.argv[1])
    time.sleep(0.02)
"""


def test_maintenance_of_a_host_becomes_the_warning_of_the_ranks(tpu: Tpu, submit: Submit, tmp_path: Path) -> None:
    make_slice(tpu, "pod1")
    job = submit(f"exec {sys.executable} -c '{WARNED}' {tmp_path}/saved")
    until(lambda: [text for _, text in printed(job)].count("up\n") == 2, "both ranks take warnings")
    assert job.status().state is State.RUNNING
    tpu.maintenance("pod1")
    status = job.wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.PREEMPTED, 85), status
    assert (tmp_path / "saved").is_dir()
