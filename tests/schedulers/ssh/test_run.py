"""Jobs on real hosts from the submit to the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schedulers import Reason, State, SubmitError, find, list_jobs
from schedulers.errors import SpecError
from schedulers.hosts.jobs import submit as submits
from schedulers.jobs.poll import restore
from schedulers.target import SupportsCheck, SupportsClear
from tests import macos
from tests.clusters.ssh import SshHosts
from tests.marks import long
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, job_files, nothing_is_left, printed

SAY = 'echo "rank $RANK of $WORLD_SIZE on $(hostname)"'


def test_a_job_on_two_hosts(submit: Submit, ssh_hosts: SshHosts, project: Path) -> None:
    odd = ("", "two words", "it's", "$(x)", "a\nb", "ü", "\udcff")
    script = f"{SAY}; pwd; test -e sub/file && for word; do printf '<%s>' \"$word\"; done"
    (project / "sub").mkdir()
    (project / "sub/file").write_text("shipped")
    job = submit(script, odd)
    status = job.wait(60)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), (status, list(job.logs()))
    words = "".join(f"<{word}>" for word in odd)
    for rank, node in enumerate(("node1", "node2")):
        code = f"{ssh_hosts.box}/home/root/.accel/jobs/{job.id}/code"
        assert printed(job, rank) == f"rank {rank} of 2 on {node}\n{code}\n{words}"
    assert job.native_id == f"node1,node2/{job.id}"


def test_start_up_files_that_print_are_in_nobodys_way(submit: Submit, ssh_hosts: SshHosts) -> None:
    """From the preflight to the removal of the job's files."""
    for machine in ssh_hosts.machines:
        ssh_hosts.home(machine.name).joinpath(".bashrc").write_text("echo Welcome; echo '{}'; echo careful >&2\n")
    job = submit("echo on; sleep 300 & wait", hosts="node[1-2]")
    until(lambda: printed(job).count("on\n") == 2, "both ranks run")
    assert job.cancel().state is State.CANCELLED
    assert printed(job) == "on\non\n"
    target = restore(job.record)
    assert isinstance(target, SupportsCheck)
    assert target.check().failures == ()
    assert isinstance(target, SupportsClear)
    assert target.clear({job.id: job.native_id}) == []
    assert not job_files(ssh_hosts, "node1", job.id).exists()
    target.close()  # type: ignore[attr-defined]


def test_a_client_on_macos(home: Path, project: Path, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    (project / "job.sh").write_text(f"{SAY}; cat note.txt\n")
    (project / "note.txt").write_text("shipped\n")
    options = host_options(ssh_hosts) | {"hosts": "node[1-2]"}
    given = {"target": "ssh", "nodes": 2, "procs_per_node": 1, "cwd": str(project), "options": options}
    given["env"] = {"PYTHONPATH": str(ROOT)}
    platform, state, text = macos.submit(macos.path(tmp_path / "macos"), ["sh", "job.sh"], given)
    assert (platform, state) == ("darwin", "succeeded")
    said = [line for rank in range(2) for line in (f"rank {rank} of 2 on node{rank + 1}", "shipped")]
    assert sorted(text.splitlines()) == sorted(said)


def test_another_machine_with_the_native_id_can_follow_and_cancel(submit: Submit) -> None:
    job = submit("trap 'echo ended in order; exit 0' TERM; echo on; sleep 300 & wait")
    other = restore(find(job.id).record)
    assert job.native_id is not None
    until(lambda: printed(job).count("on\n") == 2, "both ranks run")
    assert other.poll([job.native_id])[job.native_id].state is State.RUNNING
    other.cancel(job.native_id)
    status = job.wait(60)
    assert (status.state, status.reason) == (State.CANCELLED, Reason.USER)
    assert printed(job).count("ended in order") == 2
    other.close()  # type: ignore[attr-defined]


@pytest.mark.long
def test_the_first_failure_is_the_jobs(submit: Submit) -> None:
    job = submit('[ "$RANK" = 1 ] && { echo "no data here" >&2; exit 7; }; sleep 300')
    status = job.wait(60)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7)
    assert "rank 1" in status.message


@pytest.mark.long
def test_a_bad_host_is_replaced_by_a_spare(
    submit: Submit, ssh_hosts: SshHosts, caplog: pytest.LogCaptureFixture
) -> None:
    ssh_hosts["node1"].kill()
    job = submit(SAY, hosts="node[1-3]", options={"spares": 1})
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job, 0) == "rank 0 of 2 on node2\n"
    assert printed(job, 1) == "rank 1 of 2 on node3\n"
    assert any(message.startswith("left out: node1: ") for message in caplog.messages)


def test_too_few_hosts_are_said_each_in_a_line_and_nothing_is_left_there(submit: Submit, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node2"].kill()
    with pytest.raises(SubmitError, match=re.escape("1 of 2 hosts can take part, 2 are needed: node2: ")):
        submit(SAY, hosts="node1,node2")
    assert not (ssh_hosts.home("node1") / ".accel/jobs").exists()


def test_one_host_is_enough(submit: Submit) -> None:
    job = submit(SAY, nodes=1, hosts="node3", procs_per_node=2)
    assert job.wait(60).state is State.SUCCEEDED
    assert sorted(printed(job).splitlines()) == ["rank 0 of 2 on node3", "rank 1 of 2 on node3"]


def test_two_jobs_at_once_on_the_same_hosts_over_a_slow_network(submit: Submit, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node2"].delay(100)  # each way
    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(lambda nodes: submit(SAY, nodes=nodes), (2, 3)))
    for job, count in zip(jobs, (2, 3), strict=True):
        status = job.wait(90)
        assert status.state is State.SUCCEEDED, status
        assert job.native_id is not None
        hosts = job.native_id.partition("/")[0].split(",")  # by the slots that were free just then
        assert len(set(hosts)) == count
        assert sorted(printed(job).splitlines()) == [f"rank {i} of {count} on {hosts[i]}" for i in range(count)]


def test_a_host_whose_key_has_changed_gets_nothing(submit: Submit, ssh_hosts: SshHosts) -> None:
    ssh_hosts.new_host_key("node2")
    with pytest.raises(SubmitError, match="node2: ITS HOST KEY HAS CHANGED"):
        submit(SAY, hosts="node1,node2")
    assert not (ssh_hosts.home("node2") / ".accel").exists()


def test_a_supervisor_that_cannot_start_leaves_no_job_and_no_secret(
    submit: Submit, ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_HERE", "hush-hush")
    right = submits.settings_of

    def wrong(*args: Any) -> dict[str, Any]:
        return {**right(*args), "schema": 1 if args[2] == 0 else 0}

    monkeypatch.setattr(submits, "settings_of", wrong)
    line = "node2: settings.json is of schema 0, and this supervisor knows 1; no host runs the job"
    with pytest.raises(SubmitError, match=re.escape(line)):
        submit(SAY, secrets={"TOKEN": "env:TOKEN_HERE"})
    (record,) = list_jobs(refresh=False)
    for node in ("node1", "node2"):
        assert not (job_files(ssh_hosts, node, record.id) / "secrets.json").exists()
    result = job_files(ssh_hosts, "node1", record.id) / "exit.json"
    until(result.exists, "the one that was started has ended")
    assert json.loads(result.read_text())["state"] == "cancelled"


def test_slots_of_a_hostfile_are_processes(submit: Submit, project: Path) -> None:
    (project / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    own = ("--num_processes", "4")  # the program's
    job = submit(SAY, own, procs_per_node=None, options={"hosts": None, "hostfile": "hosts"})
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job, 3) == "rank 3 of 4 on node2\n"


def test_hosts_with_different_numbers_of_slots_keep_nothing_of_the_job(
    submit: Submit, project: Path, ssh_hosts: SshHosts
) -> None:
    (project / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    with pytest.raises(SpecError, match=r"^hosts have different numbers of slots \(node1 2, node2 1\)"):
        submit(SAY, procs_per_node=None, options={"hosts": None, "hostfile": "hosts"})
    for node in ("node1", "node2"):
        left = ssh_hosts.home(node) / ".accel/jobs"
        assert not left.exists() or list(left.iterdir()) == []


def test_a_secret_reaches_the_ranks_and_nothing_else(
    submit: Submit, ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN_HERE", "hush-hush")
    wait = tmp_path / "go on"
    script = f'test "$TOKEN" = "hush$(printf -- -)hush" && echo has it; while [ ! -e "{wait}" ]; do sleep 0.1; done'
    job = submit(script, secrets={"TOKEN": "env:TOKEN_HERE"})
    until(lambda: printed(job) == "has it\nhas it\n", "both ranks have it")
    for node in ("node1", "node2"):
        files = [path for path in job_files(ssh_hosts, node, job.id).rglob("*") if path.is_file()]
        assert not [path for path in files if b"hush-hush" in path.read_bytes()]
        assert not [
            path for path in files if path.name in ("settings.json", "state.json") and path.stat().st_mode & 0o77
        ]
        lines = ssh_hosts[node].run("sh", "-c", "cat /proc/*/cmdline 2>/dev/null || true")
        assert "hush-hush" not in str(lines)
    assert "hush-hush" not in json.dumps(job.describe())
    wait.touch()
    assert job.wait(60).state is State.SUCCEEDED


def test_setup_runs_once_a_host_and_its_failure_is_the_jobs(submit: Submit) -> None:
    """And finds the job's interpreter, as the ranks do."""
    found = f'command -v {Path(sys.executable).name}; echo "$VIRTUAL_ENV"'
    job = submit(f"{SAY}; {found}", procs_per_node=2, options={"setup": [["sh", "-c", found]]})
    assert job.wait(60).state is State.SUCCEEDED
    own = f"{sys.executable}\n{sys.prefix if sys.prefix != sys.base_prefix else ''}\n"
    setup = "".join(line.text for line in job.logs() if line.source.endswith("/setup"))
    assert setup == own * 2
    assert printed(job, 3) == f"rank 3 of 4 on node2\n{own}"
    job = submit(SAY, options={"setup": [["sh", "-c", "echo cannot; exit 3"]]})
    status = job.wait(60)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.SETUP, 3), status
    assert printed(job) == ""


def test_a_login_shell_prepares_setup_and_ranks(ssh_hosts: SshHosts, submit: Submit) -> None:
    """The job's own variables win over what the shell sets, and so does its interpreter."""
    profile = (
        'PATH=/usr/bin:/bin; A=profile; module() { [ "$2" = cuda/12 ] && export CUDA="$1 $2" || return 3; }\n'
        f"{Path(sys.executable).name}() {{ :; }}; export SHELL_KIND=login\n"
    )
    for node in ("node1", "node2"):
        (ssh_hosts.home(node) / ".bash_profile").write_text(profile)
    show = f'echo "$CUDA|$TOOL|$A|$SHELL_KIND|$(command -v {Path(sys.executable).name})|$(env | grep -c COPY_OF)"'
    lines = ["export TOOL='a  b'", 'export A="$A, $TOKEN"', "unset TOKEN"]
    job = submit(
        f'{SAY}; {show}; echo "${{#TOKEN}}"', env={"A": "1 2"}, secrets={"TOKEN": "env:HOME"},
        options={"modules": ["cuda/12"], "prologue": lines, "setup": [["sh", "-c", show]]},
    )  # fmt: skip
    assert job.wait(60).state is State.SUCCEEDED
    ready = f"load cuda/12|a  b|1 2|login|{sys.executable}|0\n"
    assert "".join(line.text for line in job.logs() if line.source.endswith("/setup")) == ready * 2
    home = len(os.environ["HOME"])
    assert printed(job, 1) == f"rank 1 of 2 on node2\n{ready}{home}\n"
    status = submit(SAY, options={"modules": ["cuda/99"]}).wait(60)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.SETUP, 3), status


def test_hosts_that_share_the_directory_are_refused(submit: Submit, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with pytest.raises(SubmitError, match=re.escape(f"share the directory {shared}: name one that each host has")):
        submit(SAY, options={"root": str(shared)})


PROGRAM = """
import sys, schedulers
schedulers.submit("./job.sh", target="ssh", entry="command", cwd=sys.argv[1], **eval(sys.argv[2]))
"""


@pytest.mark.parametrize("after_s", [0.9, *long(0.3, 0.6, 1.2, 1.5, 1.8, 2.1)])
def test_a_client_that_is_killed_leaves_a_whole_job_or_none(
    ssh_hosts: SshHosts, home: Path, project: Path, after_s: float
) -> None:
    (project / "job.sh").write_text("#!/bin/sh\necho on\nsleep 2\n")
    (project / "job.sh").chmod(0o755)
    options = host_options(ssh_hosts) | {"hosts": "node[1-3]", "start_timeout_s": 4}
    given = {"nodes": 3, "procs_per_node": 1, "options": options, "env": {"PYTHONPATH": str(ROOT)}}
    client = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(project), repr(given)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        client.wait(after_s)
    client.kill()
    client.wait()
    records = list_jobs(refresh=False)
    if not records:
        return  # not even the intent was written
    job = find(records[0].id)
    status = job.wait(60)  # which carries out a submit that was cut off
    ranks = printed(job) if job.native_id else ""
    assert (status.state, ranks) in (
        (State.SUCCEEDED, "on\n" * 3),
        (State.FAILED, ""),
    ), (status, ranks)
    close(job)
    nothing_is_left(ssh_hosts)


def test_a_submit_that_is_repeated_finds_its_job(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(SAY)
    again = restore(job.record)
    assert again.submit(job.record.plan()) == job.native_id
    assert job.wait(60).state is State.SUCCEEDED
    assert again.submit(job.record.plan()) == job.native_id
    assert printed(job) == "rank 0 of 2 on node1\nrank 1 of 2 on node2\n"
    again.close()  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_host_that_dies_ends_the_job_and_its_name_is_said(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit("echo on; sleep 300")
    until(lambda: printed(job).count("on\n") == 2, "both ranks run")
    ssh_hosts["node2"].kill()
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.NODE_FAILURE), status
    assert "node2" in status.message
    shown = list(job.logs(follow=True))
    assert [line.text for line in shown if line.rank == 0] == ["on\n"]
    assert [line.rank for line in shown if "its logs cannot be read: node2: " in line.text] == [None]


def test_the_same_code_is_sent_once(submit: Submit, ssh_hosts: SshHosts) -> None:
    first = submit(SAY)
    blobs = ssh_hosts.home("node1") / ".accel/blobs"
    before = {path.name: path.stat().st_ino for path in blobs.iterdir()}
    second = submit(SAY)
    assert {path.name: path.stat().st_ino for path in blobs.iterdir()} == before
    assert len(before) == 1
    assert first.wait(60).state is second.wait(60).state is State.SUCCEEDED


def test_what_is_written_on_hosts_is_the_users_alone(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(SAY)
    job.wait(60)
    top = ssh_hosts.home("node1") / ".accel"
    own = [top, *(path for path in top.rglob("*") if "code" not in path.relative_to(top).parts)]
    assert [str(path) for path in own if os.lstat(path).st_mode & 0o77] == []
    close(job)
