"""`accel cancel` of a job that has ended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from accel.cli import exit_status, main
from schedulers import JobSpec, Reason, State, Status, find
from schedulers.store.store import Store
from schedulers.target import Plan

_KUBECONFIG = """\
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: lab, context: {{cluster: c}}}}]
current-context: lab
"""


@pytest.mark.parametrize("exists", [True, False])
def test_a_job_that_had_ended_where_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    """Also where the kubeconfig has gone with the cluster. Cancelling it is no error: the state does not change."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    config = tmp_path / "kubeconfig"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    if exists:
        config.write_text(_KUBECONFIG.format(port=port))
    store, spec = Store.default(), JobSpec(argv=("train.py",), code=str(tmp_path))
    job_id = store.new_id()
    plan = Plan(target="cluster", kind="kubernetes", job_id=job_id)
    options = {"kubeconfig": str(config), "image": "example.org/train:1"}
    record = store.create(job_id, spec, plan, target="cluster", kind="kubernetes", options=options)
    ended = Status(state=State.FAILED, reason=Reason.EXIT_CODE, exit_code=7)
    record.update(ended, f"job/team/run1/{job_id}")
    assert main(["cancel", job_id]) == exit_status.OK
    out, err = capsys.readouterr()
    assert out == f"{job_id}\tfailed\n"
    (first, warning) = err.splitlines()
    assert first == f"accel: job {job_id} had already ended: failed"
    assert warning.startswith(f"accel: warning: job {job_id}: cannot check whether parts of it still run: ")
    assert str(config) in warning or str(port) in warning
    job = find(job_id)
    assert job.cancel().state is State.FAILED
    assert job.record.warning.startswith("cannot check whether parts")
