"""The local target for a user who is not root, from the submit to the prune."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import ordinary
from tests.needs import missing

from .conftest import Accel

HELD = "import os, time; print(os.getuid(), os.getpid(), flush=True); time.sleep(1000)"


@dataclass(frozen=True)
class Ordinary(Accel):
    """`accel` as an ordinary user, whose home is `here`."""

    scratch: Path
    no_new_privs: bool = True

    def command(self, *argv: str) -> list[str]:
        command = ordinary.command(super().command(*argv), self.scratch)
        return [word for word in command if self.no_new_privs or word != "--no-new-privs"]

    def env(self, **more: str) -> dict[str, str]:
        env = super().env(HOME=str(self.here), **more)
        return {name: value for name, value in env.items() if name != "ACCEL_HOME"}


@pytest.fixture
def accel(tmp_path: Path) -> Iterator[Ordinary]:
    with tempfile.TemporaryDirectory() as here:  # pytest's own are closed to others
        if os.geteuid() == 0:
            os.chown(here, ordinary.NOBODY, ordinary.NOBODY)
        runner = Ordinary(here=Path(here), home=Path(here) / ".local/share/accel", scratch=tmp_path)
        ordinary.check(tmp_path)
        yield runner
        for job in json.loads(runner("list", "--json"))["jobs"]:
            if job["state"] in ("submitting", "queued", "running"):
                runner.finish("cancel", job["id"])


def test_a_job_from_its_submit_to_its_end(accel: Ordinary) -> None:
    user = ordinary.NOBODY if os.geteuid() == 0 else os.getuid()
    assert accel("submit", "--follow", accel.script("import os; print(os.getuid())", "short.py")) == f"{user}\n"
    held = accel("submit", accel.script(HELD)).strip()
    with accel.start("logs", "-f", held) as following:
        assert following.stdout is not None
        uid, pid = following.stdout.readline().split()
        assert int(uid) == user
        assert accel("cancel", held) == f"{held}\tcancelled\n"
        assert following.wait(60) == 0
        following.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert {path.stat().st_uid for path in accel.home.rglob("*")} == {user}
    assert len(accel("prune", "--keep", "0").split()) == 2


LEAVES = """
import subprocess
code = "import os, time; os.setresuid(0, 0, 0); print('root', flush=True); time.sleep(1000)"
process = subprocess.Popen([{program!r}, "-c", code], stdout=subprocess.PIPE)
print(process.stdout.readline())
"""


def test_a_process_that_only_root_may_end_is_named(accel: Ordinary) -> None:
    if os.geteuid() != 0:
        missing("root, who makes a set-user-id program", "run the tests as root on Linux")
    accel = dataclasses.replace(accel, no_new_privs=False)
    program = accel.here / "python"
    shutil.copy(os.path.realpath(sys.executable), program)
    program.chmod(0o4755)
    job = accel("submit", accel.script(LEAVES.format(program=str(program)))).strip()
    try:
        accel("wait", job)
        status = json.loads(accel("status", "--json", job))
        assert status["state"] == "succeeded"
        named = status["message"].removeprefix("processes of the job belong to another user and still run: ")
        (pid,) = [int(number) for number in named.split(", ")]
    finally:
        left = [process.pid for process in psutil.process_iter(["exe"]) if process.info["exe"] == str(program)]
        for number in left:
            os.kill(number, signal.SIGKILL)
    assert left == [pid]
