"""Jobs that share hosts: placed by free slots, and in each host's queue until there are some."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, JobSpec, Reason, State
from schedulers.hosts.host_list import Host
from schedulers.hosts.jobs import placement
from schedulers.hosts.jobs.native_id import Native
from schedulers.hosts.preflight import examine
from schedulers.store.store import Store
from schedulers.sweeps import submit_sweep
from tests.clusters.ssh import SshHosts
from tests.nvml import fake_gpus
from tests.waiting import until

from .conftest import ROOT, Submit, close, host_options, nothing_is_left, printed

ONE = {"concurrency": 1}
HOLD = 'echo "on $(hostname)"; while [ ! -e ~/go ]; do sleep 0.1; done; rmdir ~/busy; echo off'
# Two at once on a host would find each other here.
ALONE = f"mkdir ~/busy || exit 9; {HOLD}"


def go(hosts: SshHosts) -> None:
    for name in hosts.names:
        (hosts.home(name) / "go").touch()


def on(job: Job) -> str:
    """The host of a job that has one."""
    assert job.native_id is not None
    (host,) = Native.parse(job.native_id).hosts
    return host.name


def until_message(job: Job, text: str) -> None:
    until(lambda: text in job.status().message, f"{text!r} is why {job.id} waits, not {job.status().message!r}")


def until_on(*jobs: Job) -> None:
    until(lambda: all("on " in printed(job) for job in jobs), "they run")


def test_a_sweep_spreads_over_the_hosts_and_each_host_runs_what_it_has_room_for(
    ssh_hosts: SshHosts, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "job.sh").write_text(f"#!/bin/sh\n{ALONE}\n")
    (project / "job.sh").chmod(0o755)
    asked: list[Host] = []

    def counted(pool: Any, hosts: list[Host], *args: Any, **given: Any) -> Any:
        asked.extend(hosts)
        return examine(pool, hosts, *args, **given)

    monkeypatch.setattr(placement, "examine", counted)
    options = host_options(ssh_hosts) | {"hosts": "node[1-3]", **ONE}
    base = JobSpec(argv=("./job.sh",), entry="command", procs_per_node=1, code=str(project), options=options,
                   env={"PYTHONPATH": str(ROOT)}, grace_s=2.0)  # fmt: skip
    jobs = submit_sweep([base] * 6, "ssh", Store.default(), start=project)
    try:
        assert [host.name for host in asked] == ["node1", "node2", "node3"]
        assert Counter(map(on, jobs)) == {"node1": 2, "node2": 2, "node3": 2}
        until_on(*jobs[:3])
        for job in jobs[3:]:
            until_message(job, f"waits for 1 of {on(job)}'s 1 places")
            status = job.status()
            assert (status.state, status.reason) == (State.QUEUED, Reason.NO_CAPACITY)
        go(ssh_hosts)
        assert [job.wait(120).state for job in jobs] == [State.SUCCEEDED] * 6
        nothing_is_left(ssh_hosts)
    finally:
        close(jobs[0])
        for machine in ssh_hosts.machines:
            machine.kill()


def test_who_waits_can_be_cancelled_and_whatever_ends_a_holder_lets_the_next_go_on(
    submit: Submit, ssh_hosts: SshHosts
) -> None:
    first, second, third, fourth = (submit(ALONE, nodes=1, hosts="node1", options=ONE) for _ in range(4))
    until_on(first)
    until_message(second, "waits for 1 of node1's 1 places")
    until_message(third, f"waits for its turn on node1 behind job {second.id}")
    second.cancel()
    status = second.wait(60)
    assert (status.state, status.reason, printed(second)) == (State.CANCELLED, Reason.USER, "")
    elsewhere = submit(HOLD, nodes=1, hosts="node[1-2]", options=ONE)
    assert on(elsewhere) == "node2"
    state = ssh_hosts.home("node1") / ".accel/jobs" / first.id / "state.json"
    ssh_hosts["node1"].run("kill", "-9", str(json.loads(state.read_text())["pid"]))
    (ssh_hosts.home("node1") / "busy").rmdir()
    until_on(third)
    assert first.wait(60).state is State.FAILED
    ssh_hosts.reboot("node1")
    for job in (third, fourth):
        assert job.wait(60).reason is Reason.LOST
    (ssh_hosts.home("node1") / "busy").rmdir()
    last = submit(ALONE, nodes=1, hosts="node1", options=ONE)
    until_on(last)
    go(ssh_hosts)
    assert last.wait(60).state is elsewhere.wait(60).state is State.SUCCEEDED


def test_jobs_on_several_hosts_wait_for_each_other_and_end(submit: Submit, ssh_hosts: SshHosts) -> None:
    first = submit(ALONE, hosts="node1,node2", options=ONE)
    until(lambda: printed(first).count("on ") == 2, "the first runs")
    second = submit(ALONE, hosts="node2,node1", options=ONE)
    third = submit(ALONE, hosts="node1,node2", options=ONE)
    until(lambda: " places" in second.status().message, "the second waits for the first")
    until(lambda: f"behind job {second.id}" in third.status().message, "the third waits for the second")
    # Later words may come from another host of the job, and be the same.
    name = second.status().message.split("of ")[-1].partition("'")[0]
    assert name in ("node1", "node2")
    go(ssh_hosts)
    assert [job.wait(120).state for job in (first, second, third)] == [State.SUCCEEDED] * 3


def test_each_job_sees_gpus_of_its_own(
    submit: Submit, ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-aaaa", "GPU-bbbb"])
    (ssh_hosts.home("node1") / ".bashrc").write_text(f"export LD_LIBRARY_PATH={tmp_path}/lib\n")
    show = f'echo "on $CUDA_VISIBLE_DEVICES"; {HOLD}'
    give = partial(submit, show, nodes=1, hosts="node1", gpus=1, options={"cpu": False})
    jobs = [give(), give(), give()]
    until_on(*jobs[:2])
    assert sorted(printed(job).splitlines()[0] for job in jobs[:2]) == ["on GPU-aaaa", "on GPU-bbbb"]
    until_message(jobs[2], "waits for 1 of node1's 2 GPUs")
    go(ssh_hosts)
    assert [job.wait(60).state for job in jobs[2:]] == [State.SUCCEEDED]
    with pytest.raises(schedulers.SubmitError, match="has 2 of 3 GPUs"):
        submit(show, nodes=1, hosts="node1", gpus=3, options={"cpu": False})
