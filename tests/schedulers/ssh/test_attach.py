"""A job that is followed from a machine that did not submit it, and that has nothing but keys and the job's id."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accel.cli import exit_status
from schedulers import Reason, State, UnknownJob, Unreachable, find
from schedulers.store.store import created_at
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, job_files, printed

SAY = 'echo "rank $RANK"'
Elsewhere = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def elsewhere(ssh_hosts: SshHosts, tmp_path: Path) -> Elsewhere:
    """Runs `accel` as another machine does: a store, a configuration and a directory of its own."""
    here = tmp_path / "elsewhere"
    here.mkdir()
    given = {"kind": "ssh", "hosts": "node[1-4]", **host_options(ssh_hosts)}
    (here / "accel.yaml").write_text(json.dumps({"targets": {"lab": given}}))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACCEL_HOME": str(here / "home")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "accel", *words]
        return subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=100)

    return run


def test_everything_from_another_machine(submit: Submit, elsewhere: Elsewhere, home: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    job = submit(
        f"""{SAY}; until [ -e '{go_on}' ]; do sleep 0.1; done; echo "last of $RANK"
        [ $RANK = 1 ] || {{ touch '{go_on}.0'; exit 0; }}; until [ -e '{go_on}.0' ]; do sleep 0.1; done; exit 7""",
        env={"LR": "0.1"},
        secrets={"HOME_HERE": "env:HOME"},
        name="far away",
    )
    shutil.rmtree(home)
    unknown = elsewhere("status", job.id)
    assert unknown.returncode == exit_status.ERROR
    assert unknown.stderr.startswith(f"accel status: no job {job.id} here; ")
    assert f"accel status {job.id} --target NAME looks for it there" in unknown.stderr
    first = elsewhere("status", job.id, "--target", "lab", "--json")
    assert first.returncode == exit_status.OK, first.stderr
    found = json.loads(first.stdout)
    assert (found["id"], found["name"], found["target"], found["nodes"]) == (job.id, "far away", "lab", 2)
    assert found["state"] in ("queued", "running")
    assert found["native_id"] == f"node1,node2/{job.id}"
    assert found["created_at"] == created_at(job.id)
    listed = elsewhere("list")
    assert listed.stdout.split("\t")[:2] == [job.id, "far away"]
    with ThreadPoolExecutor() as pool:
        following = pool.submit(elsewhere, "logs", "-f", job.id)
        waiting = pool.submit(elsewhere, "wait", job.id[:8])
        go_on.touch()
        assert (following.result().returncode, waiting.result().returncode) == (exit_status.OK, 7), (
            waiting.result().stderr
        )
    lines = following.result().stdout.splitlines()
    assert sorted(lines) == ["[rank 0] last of 0", "[rank 0] rank 0", "[rank 1] last of 1", "[rank 1] rank 1"]
    assert waiting.result().stdout == f"{job.id}\tfailed\n"
    described = json.loads(elsewhere("describe", "--json", job.id).stdout)
    assert described["spec"]["secrets"] == {"HOME_HERE": "env:HOME"}
    assert described["spec"]["env"]["LR"] == "0.1"
    assert described["status"]["exit_code"] == 7
    assert described["events"][0]["event"] == "adopted"
    shown = elsewhere("describe", job.id).stdout
    assert "submitted by another machine" in shown
    assert "by another machine" in elsewhere("status", job.id).stdout


def test_cancel_from_another_machine_while_both_follow(submit: Submit, elsewhere: Elsewhere) -> None:
    job = submit("trap 'echo ended in order; exit 0' TERM; echo on; sleep 300 & wait")
    until(lambda: printed(job).count("on\n") == 2, "both ranks run")
    with ThreadPoolExecutor() as pool:
        here = pool.submit(job.wait, 60)
        there = pool.submit(elsewhere, "wait", job.id, "--target", "ssh", "--hosts", "node2", *options_of(job))
        done = elsewhere("cancel", job.id, "--target", "lab")
        assert (done.returncode, done.stdout) == (exit_status.OK, f"{job.id}\tcancelled\n"), done.stderr
        assert (here.result().state, here.result().reason) == (State.CANCELLED, Reason.USER)
        assert there.result().returncode == exit_status.CANCELLED, there.result().stderr
    assert printed(job).count("ended in order") == 2


def options_of(job: object) -> list[str]:
    options = job.record.options()  # type: ignore[attr-defined]
    return [word for key in ("ssh_config", "python") for word in ("--option", f"{key}={options[key]}")]


def test_one_host_is_enough_to_find_a_job_on_several(
    submit: Submit, ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(SAY)
    assert job.wait(60).state is State.SUCCEEDED
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "other"))
    address = ssh_hosts["node2"].address
    other = find(job.id.upper(), target="ssh", options={**host_options(ssh_hosts), "hosts": address})
    assert other.native_id == f"node1,{address}/{job.id}"  # the first as the submitter called it
    assert other.status().state is State.SUCCEEDED
    assert printed(other) == "rank 0\nrank 1\n"
    assert other.spec == job.spec
    assert find(job.id).record.adopted
    close(other)


def test_what_is_not_there(
    submit: Submit, ssh_hosts: SshHosts, elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(SAY, hosts="node3", nodes=1)
    assert job.wait(60).state is State.SUCCEEDED
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "other"))
    options = {**host_options(ssh_hosts), "hosts": "node1,node2"}
    with pytest.raises(UnknownJob, match=f"no job {job.id}, here or on target ssh"):
        find(job.id, target="ssh", options=options)
    ssh_hosts["node2"].kill()
    with pytest.raises(Unreachable, match="1 other host does not know it\\): node2: "):
        find(job.id, target="ssh", options=options)
    (job_files(ssh_hosts, "node3", job.id) / "exit.json").unlink()
    (job_files(ssh_hosts, "node3", job.id) / "state.json").unlink()
    with pytest.raises(UnknownJob, match="is being submitted to target ssh right now, or was never started there"):
        find(job.id, target="ssh", options={**options, "hosts": "node3"})
    for words, said in [
        (("status", job.id[:5], "--target", "lab"), "give its full id"),
        (("status", job.id, "--target", "local"), "target local (local) cannot find jobs of other machines"),
        (("logs", job.id, "--hosts", "node3"), "need --target NAME"),
        (("status", job.id, "--target", "lba"), "did you mean 'lab'?"),
    ]:
        done = elsewhere(*words)
        assert done.returncode != exit_status.OK
        assert said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert elsewhere("list").stdout == ""


def test_lines_of_a_host_that_does_not_answer_are_missed_and_said(
    submit: Submit, ssh_hosts: SshHosts, elsewhere: Elsewhere
) -> None:
    job = submit(f"{SAY}; sleep 300", max_restarts=0)
    until(lambda: printed(job) == "rank 0\nrank 1\n", "both ranks run")
    ssh_hosts.end_sshd("node2")
    ssh_hosts.end_sessions("node2")
    some = elsewhere("logs", job.id, "--target", "lab")
    assert (some.returncode, some.stdout) == (exit_status.ERROR, "[rank 0] rank 0\n")
    assert some.stderr.startswith("accel logs: its logs cannot be read: node2: ")
    assert len(some.stderr.splitlines()) == 1
    assert elsewhere("cancel", job.id).returncode == exit_status.OK  # node1 hears of it, and tells node2
    for words in (("logs", job.id), ("logs", "-f", job.id)):
        some = elsewhere(*words)
        assert (some.returncode, some.stdout) == (exit_status.ERROR, "[rank 0] rank 0\n")
        missing = [line for line in some.stderr.splitlines() if "node2" in line]
        assert len(missing) == 1
        assert ": its logs cannot be read: node2: " in missing[0]
    lines = [json.loads(line) for line in elsewhere("logs", "--json", job.id).stdout.splitlines()]
    assert [line["stream"] for line in lines if "node2" in line["text"]] == ["missing"]
    ssh_hosts.start_sshd("node2")
    assert elsewhere("logs", job.id).stdout == "[rank 0] rank 0\n[rank 1] rank 1\n"


def test_hosts_that_have_their_names_from_others_end_no_job(ssh_hosts: SshHosts, submit: Submit, project: Path) -> None:
    """The job's hosts lose their files, as machines that were reinstalled."""
    job = submit(
        f"cd /; echo up; until [ -e {shlex.quote(str(project / 'end'))} ]; do sleep 0.1; done", hosts="node[1-2]"
    )
    until(lambda: printed(job).count("up") == 2, "both ranks run")
    assert job.status().state is State.RUNNING
    assert job.record.backend.startswith("hosts=")
    roots = [job_files(ssh_hosts, node, job.id).parents[1] for node in ("node1", "node2")]
    for root in roots:
        root.rename(f"{root}.old")
    for _ in range(2):
        assert find(job.id).status().state is State.RUNNING
        roots[0].mkdir(exist_ok=True)
    other = find(job.id)
    assert other.status().state is State.RUNNING
    assert "if that is gone for good" in other.record.warning
    # A submit that was cut off is not repeated on these machines.
    events = other.record.directory / "events.jsonl"
    whole = events.read_text()
    events.write_text(whole.splitlines()[0].replace(f'"pid":{os.getpid()}', '"pid":4194303') + "\n")
    cut = find(job.id)
    assert cut.status().state is State.SUBMITTING
    assert "but they are others now" in cut.record.warning
    assert cut.record.backend == ""
    close(cut)
    events.write_text(whole)
    close(other)
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)
        Path(f"{root}.old").rename(root)
    (project / "end").touch()
    assert job.wait(60).state is State.SUCCEEDED
    ids = [(root / "host-id").read_text() for root in roots]
    assert len(set(ids)) == 2
    again = submit("true", hosts="node[1-2]")
    assert again.record.backend == job.record.backend
    assert again.wait(60).state is State.SUCCEEDED
    assert ids == [(root / "host-id").read_text() for root in roots]
