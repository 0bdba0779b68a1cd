"""docs/tpu.md, followed literally: its files, and the commands of its `console` fences, on hosts without TPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.tpu import Tpu
from tests.test_docs import ROOT, fences

from .conftest import empty, make_slice

PAGE = ROOT / "docs/tpu.md"
# Here the workers have no TPU, one interpreter and no bucket, and answer at ports of their own.
_LEFT_OUT = ("requirements", "requirements_python", "checkpoint_uri", "venv")


@pytest.fixture
def project(tpu: Tpu, tmp_path: Path) -> Path:
    """The page's files. Its project is the API's, and each target has what these hosts need."""
    directory = tmp_path / "project"
    directory.mkdir()
    for _, name, body in fences(PAGE):
        if name:
            (directory / name).write_text(body)
    lines = (directory / "accel.yaml").read_text().replace("my-project", tpu.project).splitlines()
    kept = [line for line in lines if line.partition(":")[0].strip() not in _LEFT_OUT]
    own = {"cpu": "true", "python": sys.executable, "ssh_config": tpu.hosts.config, "disk_gb": "0.001"}
    more = "".join(f"\n    {key}: {value}" for key, value in own.items())
    text = "\n".join(kept).replace("kind: tpu", f"kind: tpu{more}")
    (directory / "accel.yaml").write_text(f"{text}\n")
    return directory


def commands() -> Iterator[tuple[str, list[str]]]:
    """The page's commands, each with the lines that it prints. Those that print nothing there are for real hosts."""
    for language, _, body in fences(PAGE):
        for block in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:] if language == "console" else ():
            command, *shown = block.replace("\\\n", "").splitlines()
            if shown:
                yield command, shown


def test_a_job_and_a_command_on_the_workers(tpu: Tpu, project: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "ACCEL_HOME": str(tmp_path / "home"), "PATH": path}
    found = list(commands())
    assert [command.split()[1] for command, _ in found] == ["submit", "tpu-config"]
    for command, shown in found:
        if "pod1" in command:
            empty(tpu)  # the first job's slice has all of the hosts that there are
            make_slice(tpu, "pod1")
        done = subprocess.run(
            ["bash", "-c", command], cwd=project, env=env, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for line in shown:
            assert line == "…" or " ".join(line.split()) in printed, (command, done.stdout)
