"""A client and a server of different versions: this one, and a copy that is changed as a next version may be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import accel
import schedulers
from schedulers.config.servers import Server, add_server
from schedulers.job import Reason, State
from tests.waiting import until

from .conftest import ROOT, RunningServer, Team, start_server

NEXT = "0.2.0"
_CHANGES = {
    "accel/__init__.py": [(f'__version__ = "{accel.__version__}"', f'__version__ = "{NEXT}"')],
    "schedulers/job.py": [("    image: str | None = None\n", "    image: str | None = None\n    tier: int = 0\n")],
    "schedulers/status.py": [
        ('    QUEUED = "queued"\n', '    QUEUED = "queued"\n    ASLEEP = "asleep"\n'),
        ('    NONE = "none"\n', '    NONE = "none"\n    TIRED = "tired"\n'),
    ],
    # Jobs of tier 7 sleep, as far as the server tells its clients.
    "accel/serve/jobs.py": [
        ("    native_state: str\n", "    native_state: str\n    slept_s: float = 0.0\n"),
        ("    return JobView(**{", "    if '\"tier\": 7' in row['request']:\n"
         "        row = {**row, 'state': 'asleep', 'reason': 'tired'}\n    return JobView(**{"),
    ],
}  # fmt: skip
_SUBMIT = """
from schedulers import JobSpec, submit_spec
print(submit_spec(JobSpec(argv=("train.py",), tier=7), "team/local").id)
"""


@pytest.fixture(scope="session")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with both packages of the next version."""
    directory = tmp_path_factory.mktemp("next")
    for package in ("accel", "schedulers"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in _CHANGES.items():
        text = (directory / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (directory / name).write_text(text)
    return directory


def _python(next_version: Path, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the next version."""
    env = {**os.environ, "PYTHONPATH": str(next_version)}
    return subprocess.run([sys.executable, *words], cwd=project, env=env, capture_output=True, text=True)


@pytest.fixture
def project(homes: Path) -> Path:
    (homes / "project").mkdir()
    (homes / "project/train.py").write_text("print('trained')\n")
    return homes / "project"


def test_a_newer_client(next_version: Path, team: Team, homes: Path, project: Path) -> None:
    team.log_in(homes / "config")
    assert _python(next_version, project, "-c", "import accel; print(accel.__version__)").stdout == f"{NEXT}\n"
    done = _python(next_version, project, "-m", "accel", "submit", "--follow", "train.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    listed = _python(next_version, project, "-m", "accel", "list", "--target", "team/local")
    assert "\ttrain\tsucceeded\tteam/local\t" in listed.stdout, listed
    refused = _python(next_version, project, "-c", _SUBMIT)
    expected = f"team is accel {accel.__version__} and does not know spec.tier: upgrade it, or leave that out"
    assert refused.stderr.splitlines()[-1].endswith(expected), refused.stderr


def test_a_newer_server(next_version: Path, homes: Path, project: Path) -> None:
    env = {**os.environ, "ACCEL_HOME": str(homes / "server"), "PYTHONPATH": str(next_version)}
    server = start_server(homes, env)
    try:
        _follow_jobs_of(server, next_version, homes, project)
    finally:
        server.stop()


def _follow_jobs_of(server: RunningServer, next_version: Path, homes: Path, project: Path) -> None:
    token = (homes / "server/service/owner-token").read_text().strip()
    add_server(Server(name="team", url=server.url, token=token))
    done = schedulers.submit("train.py", target="team/local", cwd=project)
    assert [line.text for line in done.logs(follow=True)] == ["trained\n"]
    assert done.wait().state is State.SUCCEEDED
    submitted = _python(next_version, project, "-c", _SUBMIT)
    assert submitted.returncode == 0, submitted.stderr
    asleep = schedulers.find(submitted.stdout.strip(), target="team/local")
    status = asleep.status()
    assert (status.state, status.reason) == (State.UNKNOWN, Reason.UNKNOWN)
    assert "state 'asleep' was written by a newer accel" in status.message
    until(lambda: [line.text for line in asleep.logs()] == ["trained\n"], "it has printed its line")
    assert asleep.cancel(wait=False).state is State.UNKNOWN
