"""`accel shell`: AWS's session-manager-plugin, of which a program that writes down its arguments has the place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from schedulers import Job, State
from schedulers.errors import ConfigError, SpecError
from tests.clusters.sagemaker import SageMaker
from tests.waiting import until

from .conftest import Submit

_PLUGIN = """\
#!/bin/sh
printf '%s\\n' "$@" "$AWS_SSM_START_SESSION_RESPONSE" >"$PLUGIN_LOG"
exit 7
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What it was given: a line an argument, then the variable."""
    program, log = tmp_path / "bin/session-manager-plugin", tmp_path / "plugin.log"
    program.parent.mkdir()
    program.write_text(_PLUGIN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PLUGIN_LOG", str(log))
    return log


def running(job: Job) -> Job:
    until(lambda: job.status().state is State.RUNNING, "the job runs")
    return job


def test_a_session_on_a_node(sagemaker: SageMaker, submit: Submit, plugin: Path) -> None:
    job = running(submit("sleep 600", nodes=2, options={"enable_remote_debug": True}))
    assert job.shell(1) == 7
    name, region, operation, profile, request, url, session = plugin.read_text().splitlines()
    assert (name, region, operation, profile, url) == (
        "AWS_SSM_START_SESSION_RESPONSE", sagemaker.region, "StartSession", "", sagemaker.url,
    )  # fmt: skip
    asked = {"Target": f"sagemaker-training-job:{job.name}-{job.id}_algo-2"}
    assert json.loads(request) == asked
    assert set(json.loads(session)) == {"SessionId", "TokenValue", "StreamUrl"}
    (call,) = sagemaker.calls("ssm")
    assert (call.operation, call.request) == ("StartSession", asked)
    with pytest.raises(SpecError, match="returns no exit code of a command"):
        job.shell(0, ["nvidia-smi"])
    job.cancel(wait=False)


def test_a_plugin_that_is_not_installed(
    sagemaker: SageMaker, submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = running(submit("sleep 600", options={"enable_remote_debug": True}))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"session-manager-plugin not found; install it: https://docs\.aws\."):
        job.shell(0)
    assert not sagemaker.calls("ssm")
    job.cancel(wait=False)


def test_a_job_without_remote_debugging(sagemaker: SageMaker, submit: Submit, plugin: Path) -> None:
    job = running(submit("sleep 600"))
    with pytest.raises(SpecError, match=f"job {job.id} was submitted without enable_remote_debug: true"):
        job.shell(0)
    assert not plugin.exists()
    job.cancel(wait=False)
