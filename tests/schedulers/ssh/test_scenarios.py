"""What may happen to a job's hosts while it runs: servers that die, reboots, full disks, changed keys, other jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import schedulers
from schedulers import Job, Reason, State, find
from schedulers.jobs.poll import restore
from tests.clusters.ssh import SshHosts
from tests.marks import long
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, job_files, nothing_is_left, printed

STARTED = 'echo "rank $RANK on $(hostname) in $ACCEL_ATTEMPT"'
UNTIL_TOLD = f"{STARTED}; while [ ! -e ~/go ]; do sleep 0.1; done; echo went"
ONCE_MORE = f"{STARTED}; [ $ACCEL_ATTEMPT = 1 ] || sleep 300"


@pytest.fixture(autouse=True)
def _no_orphans(ssh_hosts: SshHosts, submit: Submit) -> Iterator[None]:
    yield
    nothing_is_left(ssh_hosts)


def tell(hosts: SshHosts, *nodes: str) -> None:
    for node in nodes:
        (hosts.home(node) / "go").touch()


def afresh(job: Job) -> schedulers.State:
    """What `accel status` finds, from a process that has no connections yet."""
    target = restore(find(job.id).record)
    assert job.native_id is not None
    try:
        return target.poll([job.native_id])[job.native_id].state
    finally:
        target.close()  # type: ignore[attr-defined]


def of_those_that_answer(job: Job) -> list[str]:
    found = []
    with contextlib.suppress(schedulers.Unreachable):
        for line in job.logs():
            found.append(line.text)
    return found


def accel(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "accel", *words], env=env, capture_output=True, text=True, timeout=120)


def test_a_job_does_not_need_the_ssh_servers(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(UNTIL_TOLD, nodes=4)
    until(lambda: printed(job).count(" in 0\n") == 4, "all ranks run")
    ssh_hosts.end_sshd("node1")
    ssh_hosts.end_sessions("node1")
    assert afresh(job) is State.RUNNING
    tell(ssh_hosts, "node2")
    until(lambda: "went\n" in of_those_that_answer(job), "the lines of a host whose server lives")
    ssh_hosts.start_sshd("node1")
    tell(ssh_hosts, "node1", "node3", "node4")
    status = job.wait(60)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 0), status
    until(lambda: printed(job, 0) == "rank 0 on node1 in 0\nwent\n", "the lines of the host whose server is back")


def test_a_host_that_restarts_is_replaced_and_has_no_part_in_it(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(ONCE_MORE, hosts="node[1-4]", nodes=3, options={"spares": 1}, max_restarts=1)
    until(lambda: printed(job).count(" in 0\n") == 3, "all ranks run")
    ssh_hosts.reboot("node2")
    status = job.wait(90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    again = {line.text for line in job.logs() if line.rank is not None and line.attempt == 1}
    assert again == {f"rank {rank} on {node} in 1\n" for rank, node in enumerate(("node1", "node3", "node4"))}
    stale = json.loads((job_files(ssh_hosts, "node2", job.id) / "state.json").read_text())
    boot = ssh_hosts["node2"].run("cat", "/proc/sys/kernel/random/boot_id").strip()
    assert (stale["phase"], stale["boot"] == boot) == ("running", False)
    target = restore(job.record)
    alone = f"node2/{job.id}"
    found = target.poll([alone])[alone]
    assert (found.state, found.reason) == (State.FAILED, Reason.LOST)
    assert "their hosts restarted" in found.message
    target.close()  # type: ignore[attr-defined]
    other = submit(STARTED, hosts="node2", nodes=1)
    assert other.wait(60).state is State.SUCCEEDED
    assert printed(other) == "rank 0 on node2 in 0\n"


FILL = "if [ $(hostname) = {node} ]; then cat /dev/zero >~/.accel/fill 2>/dev/null; echo lost; touch ~/full; fi"


@pytest.mark.parametrize("node", ["node3", *long("node1")])
def test_a_disk_that_fills_loses_lines_and_says_so(submit: Submit, ssh_hosts: SshHosts, node: str) -> None:
    ssh_hosts.small_disk(node, f"{ssh_hosts.box}/home/root/.accel", 4)
    job = submit(f"{STARTED}; {FILL.format(node=node)}; while [ ! -e ~/go ]; do sleep 0.1; done; echo went", nodes=4)
    full = f"the disk that holds {ssh_hosts.box}/home/root/.accel/jobs/{job.id}/logs is full"
    until(lambda: any(full in line.text for line in job.logs()), "the loss is said")
    assert job.status().state is State.RUNNING
    tell(ssh_hosts, *ssh_hosts.names)
    status = job.wait(60)
    assert (status.state, status.message) == (
        State.SUCCEEDED,
        f"{node}: its disk was full: lines of its logs may be missing",
    )
    assert printed(job, 1 if node == "node3" else 2).endswith("went\n")
    directory = f"{ssh_hosts.box}/home/root/.accel/jobs/{job.id}"
    assert json.loads(ssh_hosts[node].run("cat", f"{directory}/exit.json"))["state"] == "succeeded"
    assert json.loads(ssh_hosts[node].run("cat", f"{directory}/state.json"))["phase"] == "ended"


VERBOSE = """
import os, time
text = "x" * 65536 if os.environ["RANK"] == "1" else "step"
while True:
    print(text, flush=True)
    time.sleep(0.01)
"""


def test_what_a_full_disk_does_to_a_rank_is_the_job_s_failure(
    submit: Submit, ssh_hosts: SshHosts, project: Path
) -> None:
    ssh_hosts.small_disk("node2", f"{ssh_hosts.box}/home/root/.accel", 4)
    (project / "train.py").write_text(VERBOSE)
    job = schedulers.submit(
        "train.py", target="ssh", cwd=project, nodes=2, procs_per_node=1, grace_s=2.0,
        env={"PYTHONPATH": str(ROOT)}, options=host_options(ssh_hosts) | {"hosts": "node1,node2"},
    )  # fmt: skip
    status = job.wait(120)
    assert (status.state, status.reason) == (State.FAILED, Reason.EXIT_CODE), status
    assert "No space left on device" in status.message
    assert "rank 1" in status.message
    assert "node2: its disk was full" in status.message
    close(job)


def test_hosts_behind_another_one(submit: Submit, ssh_hosts: SshHosts, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host node2 node3\n  ProxyJump node1\n{ssh_hosts.config.read_text()}")
    launcher = ssh_hosts.network.address(0)
    hidden = ("node2", "node3")
    for node in hidden:
        ssh_hosts[node].run("ip", "route", "add", "blackhole", f"{launcher}/32")
    try:
        job = submit(UNTIL_TOLD, nodes=3, hosts="node[1-3]", options={"ssh_config": str(config)})
        until(lambda: printed(job).count(" in 0\n") == 3, "all ranks run")
        tell(ssh_hosts, "node1", "node2", "node3")
        assert job.wait(60).state is State.SUCCEEDED
        assert printed(job, 2) == "rank 2 on node3 in 0\nwent\n"
        second = submit(f"{STARTED}; sleep 300", nodes=2, hosts="node2,node3", options={"ssh_config": str(config)})
        until(lambda: printed(second).count(" in 0\n") == 2, "both ranks run")
        second.cancel()
        assert second.wait(60).state is State.CANCELLED
    finally:
        for node in hidden:
            ssh_hosts[node].run("ip", "route", "del", "blackhole", f"{launcher}/32")


def test_a_host_key_that_changes_stops_the_asking_and_not_the_job(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit(UNTIL_TOLD, nodes=2, hosts="node3,node4")
    until(lambda: printed(job).count(" in 0\n") == 2, "both ranks run")
    close(job)
    for node in ("node3", "node4"):
        ssh_hosts.new_host_key(node)
    said = accel("status", job.id)
    text = " ".join((said.stdout + said.stderr).split())
    assert re.search(r"node[34]: ITS HOST KEY HAS CHANGED: it is ssh-ed25519 SHA256:", text)
    remedies = []
    for node in ("node3", "node4"):
        message = refused(job, node)
        assert message.count("\n") == 0
        remedies.append(message.partition("If the host was installed anew: ")[2])
    for remedy in remedies:
        assert shlex.split(remedy)[0] == "ssh-keygen"
        subprocess.run(["sh", "-c", remedy], check=True, capture_output=True)
    assert afresh(job) is State.RUNNING
    tell(ssh_hosts, "node3", "node4")
    assert job.wait(60).state is State.SUCCEEDED
    assert printed(job, 1) == "rank 1 on node4 in 0\nwent\n"


def refused(job: Job, node: str) -> str:
    target = restore(find(job.id).record)
    with pytest.raises(schedulers.Unreachable) as caught:
        target.poll([f"{node}/{job.id}"])
    target.close()  # type: ignore[attr-defined]
    return str(caught.value)


RENDEZVOUS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
for _ in range(20):
    dist.all_reduce(total)
print("of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_two_submits_at_once_to_the_same_hosts(ssh_hosts: SshHosts, project: Path, home: Path) -> None:
    (project / "train.py").write_text(RENDEZVOUS)
    options = host_options(ssh_hosts) | {"hosts": "node[1-4]", "start_timeout_s": 120, "heartbeat_s": 30}

    def submit(nodes: int) -> Job:
        return schedulers.submit(
            "train.py", target="ssh", cwd=project, nodes=nodes, procs_per_node=1, options=options,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(submit, (4, 3)))
    for job, nodes in zip(jobs, (4, 3), strict=True):
        status = job.wait(240)
        assert status.state is State.SUCCEEDED, (status, [line.text for line in job.logs()])
        assert sorted(printed(job).split("\n")) == ["", *[f"of {nodes}"] * nodes]
        close(job)


@pytest.mark.parametrize("node", ["node1", *long("node2")])
def test_a_supervisor_that_stands_still_is_given_up_and_gives_up(
    submit: Submit, ssh_hosts: SshHosts, node: str
) -> None:
    job = submit(ONCE_MORE, hosts="node[1-4]", nodes=3, options={"spares": 1}, max_restarts=1)
    until(lambda: printed(job).count(" in 0\n") == 3, "all ranks run")
    files = job_files(ssh_hosts, node, job.id)
    supervisor = str(json.loads((files / "state.json").read_text())["pid"])
    ssh_hosts[node].run("kill", f"-{signal.SIGSTOP.value}", supervisor)
    other = job_files(ssh_hosts, "node4", job.id)
    until((other / "logs/node-3.log").exists, "the spare runs")
    ssh_hosts[node].run("kill", f"-{signal.SIGCONT.value}", supervisor)
    status = job.wait(90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    until((files / "exit.json").exists, "the host that stood still has ended")
    own = json.loads((files / "exit.json").read_text())
    assert (own["state"], own["reason"], own["fenced"]) == ("failed", "node_failure", True)
    # Stopped in the midst of a turn, it finds the others silent before it looks at its own clock.
    assert "stood still for" in own["message"] or "too few to go on" in own["message"]
