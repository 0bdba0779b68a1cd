"""What commands print of a job that had terminal escapes in its name, its messages and its target's."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from accel import cli
from accel.cli import logs, output
from schedulers.errors import SubmitError
from schedulers.job import JobSpec, LogLine, Reason, State, Status
from schedulers.store.store import Store
from schedulers.target import Plan

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\u202e"
SHOWN = "red\\u202e"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of a job that has failed, and of which the target had said something before."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spec = JobSpec(argv=("train.py",), name="job", code=str(tmp_path))
    store = Store.default()
    plan = Plan(target="local", kind="local", job_id="1", warnings=(EVIL,))
    record = store.create(store.new_id(), spec, plan, target="local", kind="local")
    record.append("note", text=EVIL)
    record.update(Status(state=State.FAILED, reason=Reason.SETUP, exit_code=1, message=EVIL), native_id=EVIL)
    return record.id


@pytest.mark.parametrize("command", ["list", "status", "describe", "wait"])
def test_no_escape_is_printed(job: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([command] if command == "list" else [command, job])
    printed = capsys.readouterr()
    assert SHOWN in printed.out + printed.err
    assert not set("\x1b\x07\u202e") & set(printed.out + printed.err)


def test_no_escape_is_printed_in_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise SubmitError(f"the host says: {EVIL}\nand more")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["list"]) == 1
    assert capsys.readouterr().err == f"accel list: the host says: {SHOWN} and more\n"


def test_a_table_on_a_terminal_has_no_escapes_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "dumb")
        output.print_rows(("NAME", "MESSAGE"), [], on_terminal=[("one", EVIL)])
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert SHOWN in shown
    assert "\x1b" not in shown


def test_a_jobs_own_lines_keep_their_bytes_and_a_targets_message_does_not(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    printer = logs.LogPrinter(prefix=False, json=False, since=None, flush=True)
    colored = "\x1b[32mloss 0.5\x1b[0m\r"
    printer.print([LogLine(rank=0, text=colored, source="a", position="1")])
    printer.print([LogLine(rank=None, stream="missing", text=f"accel: {EVIL}\n", source="b", position="1")])
    sys.stdout.flush()
    printed = capfdbinary.readouterr()
    assert printed.out == colored.encode()
    assert printed.err == f"accel: {SHOWN}\n".encode()
