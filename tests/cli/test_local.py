"""`accel` from end to end: real processes on the local target, one home for each test."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.cli import exit_status
from schedulers.printable import one_line
from tests.needs import missing
from tests.waiting import until

from .conftest import Accel

HOSTILE = ["--", "-h", "--json", "", " ", "a b", "'", '"', "\n", "$(exit 1)", "`id`", "\\", "*", "é…", "-m", "--name=x"]

# Says that it runs, and then waits for the test, or for its end.
HELD = """
import fcntl
print("ready", flush=True)
with open({gate!r}) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
    print(gate.read(), flush=True)
"""


class Gate:
    """Holds the job that runs `script` until it is opened. A lock, so that a job that failed does not hold the test."""

    def __init__(self, accel: Accel) -> None:
        self.script = accel.script(HELD.format(gate=str(accel.here / "gate")))
        self._file = open(accel.here / "gate", "w")  # noqa: SIM115  # open for as long as the test holds it
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self, text: str = "released") -> None:
        self._file.write(text)
        self.close()

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def gate(accel: Accel) -> Iterator[Gate]:
    gate = Gate(accel)
    yield gate
    gate.close()


def test_submit_prints_the_id_alone_and_the_job_can_be_found_by_it(accel: Accel) -> None:
    done = accel.finish("submit", accel.script("print('hello')"))
    job_id = done.stdout.decode().rstrip("\n")
    assert job_id.isalnum()
    assert f"accel: job {job_id} submitted to local" in done.stderr.decode()
    assert accel("wait", job_id) == f"{job_id}\tsucceeded\n"
    assert accel("logs", "@last") == "hello\n"
    status = json.loads(accel("status", "--json", job_id[:-1]))
    assert (status["id"], status["state"], status["name"], status["exit_code"]) == (job_id, "succeeded", "train", 0)
    assert f"{job_id} (train)" in accel("status", job_id)


def test_every_word_after_the_script_reaches_it(accel: Accel) -> None:
    accel.script("import json, sys; print(json.dumps(sys.argv[1:]))")
    assert json.loads(accel("submit", "--follow", "--max_restarts=0", "--", "train.py", *HOSTILE)) == HOSTILE


def test_modules_and_commands(accel: Accel) -> None:
    accel.script("import sys; print('module', sys.argv[1:])", "job.py")
    assert accel("submit", "--follow", "-m", "job", "-m") == "module ['-m']\n"
    assert accel("submit", "--follow", "--no-python", "printf", "%s|", "-n", "") == "-n||"
    names = [job["name"] for job in json.loads(accel("list", "--json"))["jobs"]]
    assert names == ["printf", "job"]


def test_follow_gives_the_jobs_bytes_and_its_exit_code(accel: Accel) -> None:
    data = b"a\r\n50%\r\xff\x00\xc3\xa9 no end"
    accel.script(f"import os, sys; os.write(1, {data!r}); sys.exit(3)")
    done = accel.finish("submit", "--follow", "train.py")
    assert (done.stdout, done.returncode) == (data, 3)
    assert b"rank 0 on node 0" in done.stderr  # the launcher's report
    assert b"failed (exit code 3)" in done.stderr
    assert accel.finish("logs", "@last").stdout == data
    accel("wait", "@last", code=3)
    assert [line.split("\t")[2] for line in accel("list", "--state", "failed").splitlines()] == ["failed"]
    assert accel("list", "--state", "succeeded") == ""


def test_ctrl_c_leaves_the_job_running_and_says_how_to_cancel_it(accel: Accel, gate: Gate) -> None:
    process = accel.start("submit", "--follow", gate.script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    job_id = json.loads(accel("list", "--json"))["jobs"][0]["id"]
    assert process.returncode == exit_status.INTERRUPTED
    assert err.decode().endswith(f"cancel it: accel cancel {job_id}\n")
    assert json.loads(accel("status", "--json", job_id))["state"] == "running"
    gate.open("still here")
    accel("wait", job_id)
    assert accel("logs", job_id) == "ready\nstill here\n"


def _links(directory: Path) -> list[str]:
    links = []
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(path))
    return links


def test_ctrl_c_of_a_wait_says_that_the_job_goes_on(accel: Accel, gate: Gate) -> None:
    job_id = accel("submit", gate.script).strip()
    process = accel.start("wait", job_id, PYTHONUNBUFFERED="1")
    descriptors = Path(f"/proc/{process.pid}/fd")
    until(lambda: "anon_inode:[pidfd]" in _links(descriptors), "it waits for the supervisor's end")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_status.INTERRUPTED
    assert err.decode() == (
        f"accel: job {job_id} continues; follow it again: accel logs -f {job_id}; cancel it: accel cancel {job_id}\n"
    )
    gate.open()
    accel("wait", job_id)
    refused = accel.finish("logs", "--rank", "7", job_id)
    assert (refused.returncode, refused.stdout) == (exit_status.OK, b"")
    assert refused.stderr.decode() == f"accel: job {job_id}: no lines of rank 7\n"


def test_cancel_ends_the_job_and_may_be_said_twice(accel: Accel, gate: Gate) -> None:
    job_id = accel("submit", "--grace", "20", gate.script).strip()
    with accel.start("logs", "-f", job_id) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"ready\n"
        accel("wait", "--timeout", "0", job_id, code=exit_status.TIMED_OUT)
        assert accel("cancel", job_id) == f"{job_id}\tcancelled\n"
        assert following.wait(60) == exit_status.OK
        following.communicate()
    accel("wait", job_id, code=exit_status.CANCELLED)
    again = accel.finish("cancel", "--json", job_id)
    assert again.returncode == exit_status.OK
    assert f"job {job_id} had already ended: cancelled" in again.stderr.decode()
    assert json.loads(again.stdout)["jobs"][0]["state"] == "cancelled"


def test_a_dry_run_shows_the_plan_and_leaves_no_trace(accel: Accel) -> None:
    accel.script("")
    shown = accel("submit", "--dry-run", "--nodes=1", "--option", "concurrency=1", "train.py", "a b")
    assert "train.py 'a b'" in shown
    plan = json.loads(accel("submit", "--dry-run", "--json", "train.py"))
    assert (plan["target"], plan["kind"]) == ("local", "local")
    assert not accel.home.exists()


def test_after_takes_any_reference_and_waits_for_it(accel: Accel, gate: Gate) -> None:
    first = accel("submit", gate.script).strip()
    accel.script(f"print(open({str(accel.here / 'second')!r}).read())", "second.py")
    second = accel("submit", "--after", "@last", "second.py").strip()
    assert json.loads(accel("describe", "--json", second))["spec"]["after"] == [first]
    (accel.here / "second").write_text("after the first")  # written before the first may end, read after it has
    gate.open()
    assert accel("wait", first, second) == f"{first}\tsucceeded\n{second}\tsucceeded\n"
    assert accel("logs", second) == "after the first\n"


def test_the_environment_arrives_and_a_secret_is_stored_nowhere(accel: Accel) -> None:
    accel.script("import os; print(*(os.environ[name] for name in ('GIVEN', 'TAKEN', 'TOKEN')))")
    options = ["--env", "GIVEN=a=b", "--env", "TAKEN", "--secret", "TOKEN=env:HF_TOKEN", "--env=EMPTY="]
    shown = accel("submit", "--follow", *options, "train.py", TAKEN="here", HF_TOKEN="hf_s3cret")
    assert shown == "a=b here hf_s3cret\n"
    stored = [path for path in accel.home.rglob("*") if path.is_file() and "logs" not in path.parts]
    assert stored
    assert not any(b"hf_s3cret" in path.read_bytes() for path in stored)


def test_a_secret_in_an_error_is_not_kept(accel: Accel) -> None:
    accel.script("import os; raise ValueError('refused: ' + os.environ['TOKEN'])")
    secret = ["--secret", "TOKEN=env:HF_TOKEN"]
    done = accel.finish("submit", "--follow", *secret, "train.py", HF_TOKEN="hf_s3cret")
    assert b"ValueError: refused: (secret TOKEN)" in done.stderr
    logs = list(accel.home.rglob("rank-*.log"))
    kept = [path for path in accel.home.rglob("*") if path.is_file() and path not in logs]
    assert b"hf_s3cret" in b"".join(path.read_bytes() for path in logs)  # what the program itself has written
    assert [path for path in kept if b"hf_s3cret" in path.read_bytes()] == []


def test_several_ranks_are_told_apart(accel: Accel) -> None:
    accel.script("import os; print('rank', os.environ['RANK'])")
    done = accel.finish("submit", "--procs-per-node", "2", "--follow", "train.py")
    assert done.returncode == exit_status.OK, done.stderr
    assert {b"[rank 0] rank 0", b"[rank 1] rank 1"} <= set(done.stdout.splitlines())
    assert accel("logs", "--rank", "1", "@last") == "rank 1\n"
    assert set(accel("logs", "--no-prefix", "@last").splitlines()) >= {"rank 0", "rank 1"}


def test_logs_go_on_exactly_from_a_cursor(accel: Accel) -> None:
    accel.script("for n in range(5): print('line', n)")
    accel("submit", "--follow", "train.py")
    lines = [json.loads(line) for line in accel("logs", "--json", "@last").splitlines()]
    assert [line["text"] for line in lines] == [f"line {n}\n" for n in range(5)]
    assert accel("logs", "--since", lines[1]["cursor"], "@last") == "line 2\nline 3\nline 4\n"
    assert accel("logs", "--tail", "2", "@last") == "line 3\nline 4\n"
    assert "nor a log cursor" in accel.finish("logs", "--since", "soon", "@last").stderr.decode()


def test_following_in_json_is_a_line_each(accel: Accel) -> None:
    done = accel("submit", "--follow", "--json", accel.script("print('x')"))
    submitted, line, ended = (json.loads(text) for text in done.splitlines())
    assert (submitted["name"], line["text"], ended["state"]) == ("train", "x\n", "succeeded")
    assert submitted["id"] == ended["id"]


def test_a_reader_that_goes_away_ends_it_quietly(accel: Accel) -> None:
    accel("submit", "--follow", accel.script("for n in range(100_000): print('line', n)"))
    with accel.start("logs", "@last") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line 0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == exit_status.BROKEN_PIPE


def test_an_exit_code_stays_where_stderr_cannot_be_written(accel: Accel) -> None:
    if not Path("/dev/full").exists():
        missing("/dev/full", "run on Linux with /dev mounted")
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in (writer, os.open("/dev/full", os.O_WRONLY)):
        with os.fdopen(descriptor, "wb") as stderr:
            done = subprocess.run(
                accel.command("nonsense"), cwd=accel.here, env=accel.env(), stderr=stderr, check=False
            )
        assert done.returncode == exit_status.USAGE


def test_a_full_disk_under_stdout_is_said_in_one_line(accel: Accel) -> None:
    if not Path("/dev/full").exists():
        missing("/dev/full", "run on Linux with /dev mounted")
    accel("submit", "--follow", accel.script(""))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            accel.command("list"), cwd=accel.here, env=accel.env(), stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == exit_status.ERROR
    assert done.stderr.decode().startswith("accel list: [Errno 28]")
    assert done.stderr.count(b"\n") == 1


def test_list_is_plain_in_a_pipe_and_a_table_on_a_terminal(accel: Accel) -> None:
    accel.script("")
    ids = [accel("submit", "--name", f"[red] {n}", "train.py").strip() for n in range(3)]
    accel("wait", *ids)
    rows = [line.split("\t") for line in accel("list").splitlines()]
    assert [row[0] for row in rows] == ids[::-1]
    assert [*rows[0][1:3], rows[0][3].rpartition("/")[2], rows[0][4]] == ["[red] 2", "succeeded", "local", "1"]
    short = accel.finish("list", "--limit", "1")
    assert short.stdout.count(b"\n") == 1
    assert b"2 older jobs are not shown (--all)" in short.stderr
    shown = on_terminal(accel, "list")
    assert "SUBMITTED" in shown
    assert "[red] 2" in shown


def on_terminal(accel: Accel, *argv: str) -> str:
    ours, theirs = pty.openpty()
    env = accel.env(TERM="dumb", COLUMNS="200")
    with subprocess.Popen(accel.command(*argv), cwd=accel.here, env=env, stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says EIO when the other side has closed
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
    assert process.returncode == exit_status.OK
    return shown.decode()


def test_a_damaged_job_is_listed_as_such_and_hides_no_other(accel: Accel) -> None:
    accel.script("")
    good, bad = (accel("submit", "train.py").strip() for _ in range(2))
    accel("wait", good, bad)
    (accel.home / "jobs" / bad / "events.jsonl").write_text("not json\n")
    states = {line.split("\t")[0]: line.split("\t")[2] for line in accel("list").splitlines()}
    assert states == {good: "succeeded", bad: "damaged"}
    assert accel("prune", "--keep", "0") == f"{good}\n"
    assert accel("prune", bad) == f"{bad}\n"


def test_prune_deletes_what_has_ended_and_only_that(accel: Accel, gate: Gate) -> None:
    running = accel("submit", gate.script).strip()
    ended = accel("submit", accel.script("", "other.py")).strip()
    accel("wait", ended)
    assert accel("prune", "--older-than", "1h") == ""
    assert accel("prune", "--older-than", "0", "--dry-run") == f"{ended}\n"
    assert json.loads(accel("prune", "--json", "--keep", "0")) == {
        "pruned": [ended], "left": [], "snapshots": [], "dry_run": False
    }  # fmt: skip
    assert [job["id"] for job in json.loads(accel("list", "--json"))["jobs"]] == [running]
    gate.open()
    accel("wait", running)


def test_prune_deletes_packed_code_that_no_job_uses(accel: Accel) -> None:
    job = accel("submit", "--snapshot", accel.script("")).strip()
    accel("wait", job)
    (packed,) = (accel.home / "snapshots").glob("*.tar")
    os.utime(packed, (1, 1))
    assert json.loads(accel("prune", "--json", "--keep", "1"))["snapshots"] == []
    would = json.loads(accel("prune", "--json", "--dry-run", "--keep", "0"))
    assert (would["pruned"], would["snapshots"]) == ([job], [packed.stem])
    done = accel.finish("prune", "--keep", "0")
    assert done.stdout.decode() == f"{job}\n"
    assert done.stderr.decode() == "accel: 1 job and 1 unused snapshot of code deleted\n"
    assert not packed.exists()


def test_describe_tells_all(accel: Accel) -> None:
    accel.script("raise ValueError('no such luck')")
    (accel.here / "accel.yaml").write_text("targets:\n  small: {kind: local, concurrency: 1}\n")
    accel("submit", "--target", "small", "--follow", "--env", "SEED=1", "train.py", "--lr", "1", code=1)
    told = json.loads(accel("describe", "--json", "@last"))
    assert told["spec"]["argv"] == ["train.py", "--lr", "1"]
    assert told["plan"]["target"] == "small"
    assert told["source"] == f"{accel.here}/accel.yaml:2"
    recorded = json.loads(Path(told["directory"], "target.json").read_text())
    assert (recorded["source"], recorded["options"]) == (told["source"], {"concurrency": 1})
    assert told["events"][0]["event"] == "submitting"
    assert told["status"]["state"] == "failed"
    shown = accel("describe", "@last")
    assert "train.py --lr 1" in shown
    assert "SEED=1" in shown
    assert "no such luck" in shown
    defined = one_line(told["source"])
    assert f"small (local), defined in {defined}\n" in shown
    assert f"# target defined in {defined}\n" in shown


def test_targets_says_where_each_is_defined(accel: Accel) -> None:
    (accel.here / "accel.yaml").write_text("targets:\n  small: {kind: local, concurrency: 1}\n")
    targets = {target["name"]: target for target in json.loads(accel("targets", "--json"))["targets"]}
    assert targets["small"]["kind"] == "local"
    assert targets["small"]["options"] == {"concurrency": 1}
    assert targets["small"]["source"].endswith("accel.yaml:2")
    assert targets["local"]["source"] == "built-in"
    assert "small\tlocal\t" in accel("targets")
