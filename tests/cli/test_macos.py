"""The command line and the local target on macOS, as far as Linux can stand for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import macos
from tests.needs import package

from .conftest import ROOT, Accel

MANY = "import json, sys; from accel.cli import main; sys.exit([main(argv) for argv in json.loads(sys.argv[1])] != {})"
HELD = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"


@dataclass(frozen=True)
class OnMacos(Accel):
    modules: Path

    def env(self, **more: str) -> dict[str, str]:
        return super().env(PYTHONPATH=f"{self.modules}:{ROOT}", **more)


@pytest.fixture
def accel(tmp_path: Path) -> Iterator[OnMacos]:
    package("psutil")
    (tmp_path / "here").mkdir()
    runner = OnMacos(here=tmp_path / "here", home=tmp_path / "home", modules=macos.path(tmp_path / "macos"))
    yield runner
    for job in json.loads(runner("list", "--json"))["jobs"]:
        if job["state"] in ("submitting", "queued", "running"):
            runner.finish("cancel", job["id"])


def test_a_local_job_from_its_submit_to_its_end(accel: OnMacos) -> None:
    accel.script("import os, sys; print(sys.platform, hasattr(os, 'pidfd_open'))", "short.py")
    assert accel("submit", "--follow", "short.py") == "darwin False\n"
    held = accel("submit", accel.script(HELD)).strip()
    with accel.start("logs", "-f", held) as following:
        assert following.stdout is not None
        pid = int(following.stdout.readline())
        identity = json.loads((accel.home / "jobs" / held / "local/supervisor.json").read_text())
        assert (identity["node"], identity["pid_namespace"]) == (os.uname().nodename, "")
        assert accel("cancel", held) == f"{held}\tcancelled\n"
        assert following.wait(60) == 0
        following.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(accel("prune", "--keep", "0").split()) == 2


def test_commands_of_a_client(accel: OnMacos) -> None:
    accel.script("")
    commands = [
        ["--version"],
        ["targets", "--json"],
        ["list", "--all"],
        ["completion", "zsh"],
        ["submit", "--dry-run", "--target", "local", "--gpus", "1", "train.py"],
        ["submit", "--dry-run", "--target", "ssh", "--hosts", "gpu01,gpu02", "--nodes", "2", "train.py"],
        ["submit", "--dry-run", "--target", "slurm", "--option", "login=login", "train.py"],
        ["submit", "--dry-run", "--target", "kubernetes", "--image", "registry/train:1", "train.py"],
    ]
    argv = [sys.executable, "-c", MANY.format([0] * len(commands)), json.dumps(commands)]
    done = subprocess.run(argv, cwd=accel.here, env=accel.env(), capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
