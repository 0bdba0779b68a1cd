"""The report in a container's termination message: the outermost launcher's, whatever the program writes there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from accel.launch.termination import TerminationReport

from .conftest import Launcher

GANG = ("--num_processes", "2", "--tee", "3", "--log_dir", "logs")
FORGES = """\
import json, os, signal, sys, time
forged = json.dumps({"schema": 1, "pod": os.environ["ACCEL_POD_UID"], "reason": "preempted", "message": "not true"})
def forge(*_):
    print(forged, flush=True)
    with open(os.environ["ACCEL_TERMINATION_LOG"], "w") as file:
        file.write(forged)
def end(*_):
    forge()
    raise SystemExit(0)
forge()
if sys.argv[1] == "wait":
    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    while True: time.sleep(0.01)
if sys.argv[1] == "fail" and os.environ["RANK"] == "0":
    raise ValueError("no data")
"""


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    path = tmp_path / "termination-log"
    path.write_text("")
    return path


def in_pod(log: Path, **more: str) -> dict[str, Any]:
    return {"ACCEL_POD_UID": "uid-0", "ACCEL_TERMINATION_LOG": str(log), **more}


def written(log: Path) -> dict[str, Any]:
    data = log.read_bytes()
    assert len(data) <= 4000
    fields = json.loads(data)
    assert (fields.pop("schema"), fields.pop("pod")) == (1, "uid-0")
    return dict(fields)


@pytest.mark.parametrize("flags", [GANG[2:], GANG], ids=["one", "gang"])
def test_a_failure(launcher: Launcher, log: Path, flags: tuple[str, ...]) -> None:
    done = launcher(*flags, launcher.script(FORGES), "fail", code=1, **in_pod(log))
    assert "rank 0 on node 0 " in done.err
    fields = written(log)
    assert fields.pop("attempt") in (0, 1)
    assert fields == {"reason": "exit_code", "exit_code": 1, "rank": 0, "node": 0, "message": "ValueError: no data"}


@pytest.mark.parametrize("flags", [GANG[2:], GANG], ids=["one", "gang"])
def test_a_success(launcher: Launcher, log: Path, flags: tuple[str, ...]) -> None:
    launcher(*flags, launcher.script(FORGES), "succeed", **in_pod(log))
    assert written(log) == {}


@pytest.mark.parametrize("flags", [GANG[2:], GANG], ids=["one", "gang"])
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGALRM, 86), (signal.SIGTERM, 143)])
def test_a_time_limit_and_a_signal(
    launcher: Launcher, log: Path, flags: tuple[str, ...], signum: signal.Signals, code: int
) -> None:
    limit = {"ACCEL_TIME_LIMIT": "100", "ACCEL_TIME_LIMIT_EXIT": "86,0"}
    run = launcher.start(*flags, launcher.script(FORGES), "wait", within=in_pod(log, **limit))
    run.says("ready")
    run.send(signum)
    assert run.wait().code == code
    fields = written(log)
    if code == 86:
        assert fields == {"reason": "time_limit", "limit_s": 100, "message": "its time limit passed"}
    else:
        assert list(fields) == ["message"]
        assert fields["message"].startswith("received SIGTERM")


def test_a_launcher_that_cannot_start_its_ranks(launcher: Launcher, log: Path) -> None:
    flags = ("--log_dir", "logs", "--no_python")
    (launcher.here / "tool").write_text("#!/not/there\n")
    (launcher.here / "tool").chmod(0o755)
    done = launcher(*flags, "./tool", code=127, **in_pod(log))
    message = written(log)["message"]
    assert message == "cannot run './tool': No such file or directory"
    assert message in done.err


def test_a_launcher_below_another_writes_nothing(launcher: Launcher, log: Path) -> None:
    launcher.script("raise SystemExit(3)\n", "inner.py")
    outer = launcher.script(
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'accel', 'launch', '--log_dir', 'inner', 'inner.py']))\n"
    )
    done = launcher(outer, code=3, **in_pod(log))
    assert "rank 0 on node 0 " in done.err
    assert log.read_text() == "", "the outer launcher was replaced by its program"


@pytest.mark.parametrize("text", ["\x1b" * 9000, "\U0001f600" * 9000, "\udc80" * 9000, "x" * 9000])
def test_a_report_has_at_most_4000_bytes(log: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TERMINATION_LOG", str(log))
    with TerminationReport(pod="uid-0").written():
        pass
    assert written(log) == {}
    with pytest.raises(RuntimeError), TerminationReport(pod="uid-0").written():
        raise RuntimeError(text)
    assert len(written(log)["message"]) == 400


def test_outside_of_a_pod_nothing_is_written(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TERMINATION_LOG", str(log))
    with TerminationReport().written():
        assert log.read_text() == ""
    monkeypatch.setenv("ACCEL_TERMINATION_LOG", str(tmp_path / "none"))
    with TerminationReport(pod="uid-0").written():
        pass
    assert not os.path.exists(tmp_path / "none")
