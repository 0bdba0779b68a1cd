"""docs/sagemaker.md, followed literally: its files, and the commands of its `console` fence, with credentials alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.sagemaker import SageMaker
from tests.test_docs import ROOT, fences

PAGE = ROOT / "docs/sagemaker.md"


@pytest.fixture
def account(sagemaker: SageMaker) -> SageMaker:
    """With the role and the bucket that accel.yaml on the page names. The account and the region are the endpoint's."""
    text = next(body for _, name, body in fences(PAGE) if name == "accel.yaml")
    bucket = re.search(r"s3://([^/\s]+)", text)
    role = re.search(rf"arn:aws:iam::{sagemaker.account}:role/(\S+)", text)
    assert bucket is not None
    assert role is not None
    assert f"region: {sagemaker.region}\n" in text
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    sagemaker.client("iam").create_role(RoleName=role[1], AssumeRolePolicyDocument=document)
    sagemaker.client("s3").create_bucket(Bucket=bucket[1])
    return sagemaker


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a `console` fence, each with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def test_from_credentials_to_a_fetched_model(account: SageMaker, tmp_path: Path) -> None:
    """Only the id of the page's job is another. Importing the SageMaker SDK fails."""
    project, blocked = tmp_path / "project", tmp_path / "blocked"
    for path in (project, blocked):
        path.mkdir()
    (blocked / "sagemaker.py").write_text("raise RuntimeError('the SDK was imported')\n")
    env = {
        **os.environ, "ACCEL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(blocked),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    for _, name, body in fences(PAGE):
        if name:
            (project / name).write_text(body)
    (console,) = [body for language, _, body in fences(PAGE) if language == "console"]
    pages_id, job_id = "", ""
    for command, shown in commands(console):
        done = subprocess.run(
            ["bash", "-c", command.replace(pages_id, job_id) if pages_id else command],
            cwd=project, env=env, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr, account.diagnose())
        if command.startswith("accel submit"):
            (pages_id,), (job_id,) = shown, done.stdout.split()
        for line in shown:
            wanted = line.replace(pages_id, job_id)
            assert wanted == "…" or wanted in done.stdout.splitlines(), (command, done.stdout)
    assert list(project.glob(f"train-{job_id}/model/total.pt"))
