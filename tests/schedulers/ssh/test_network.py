"""A job over a network that is slow, or broken in places."""

from __future__ import annotations

import threading
import time

import pytest

from schedulers import State
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import Submit, nothing_is_left, printed

EACH_WAY_MS = 100
HEARTBEAT_S = 5
STARTED = 'echo "rank $RANK on $(hostname)"'


def test_a_host_far_away_takes_part_and_is_not_given_up(submit: Submit, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node2"].delay(EACH_WAY_MS)
    job = submit(f"trap 'echo told; exit 0' TERM; {STARTED}; sleep 300 & wait", nodes=4)
    followed: list[str] = []
    follower = threading.Thread(target=lambda: followed.extend(line.text for line in job.logs(follow=True)))
    follower.start()
    until(lambda: len(followed) == 4, "all ranks run, and are followed")
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 2 * HEARTBEAT_S, "it has had the time to be given up")
    status = job.status()
    assert (status.state, status.attempt) == (State.RUNNING, 0)
    job.cancel()
    assert job.wait(60).state is State.CANCELLED
    follower.join(60)
    assert not follower.is_alive()
    assert followed.count("told\n") == 4
    nothing_is_left(ssh_hosts)


@pytest.mark.long
def test_the_leader_may_be_the_host_far_away(submit: Submit, ssh_hosts: SshHosts) -> None:
    ssh_hosts["node1"].delay(EACH_WAY_MS)
    job = submit(STARTED, nodes=4)
    status = job.wait(90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 0), status
    assert sorted(printed(job).splitlines()) == [f"rank {rank} on node{rank + 1}" for rank in range(4)]
    nothing_is_left(ssh_hosts)
