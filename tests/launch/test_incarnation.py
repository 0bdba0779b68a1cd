"""Which start of a node's launcher takes over from which, and the number of its attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.launch.errors import LaunchConfigError
from accel.launch.failure import Failure
from accel.launch.incarnation import Incarnation, count_start, incarnation_from_env, latest_attempt
from schedulers.topology import Topology

ALONE = Topology(node_rank=0, nodes=1, master="127.0.0.1")


@pytest.mark.parametrize(
    ("later", "earlier", "replaces"),
    [
        (Incarnation(), Incarnation(), False),  # typed by hand, twice
        (Incarnation(pod="a", starts=1), Incarnation(pod="a"), True),
        (Incarnation(pod="a"), Incarnation(pod="a", starts=1), False),
        (Incarnation(pod="a"), Incarnation(pod="a"), False),
        (Incarnation(pod="b"), Incarnation(pod="a", starts=3), True),
        (Incarnation(pod="b"), Incarnation(), False),
        (Incarnation(attempt=1, counted=True), Incarnation(attempt=0, counted=True), True),
        (Incarnation(attempt=1, counted=True), Incarnation(attempt=1, counted=True), False),
        (Incarnation(attempt=1, counted=True), Incarnation(attempt=0), False),
    ],
)
def test_who_takes_over(later: Incarnation, earlier: Incarnation, replaces: bool) -> None:
    assert later.replaces(earlier) is replaces
    assert later.replaces(Incarnation.decode(earlier.encode())) is replaces


def test_encoding() -> None:
    for one in (Incarnation(), Incarnation(pod="a-b", starts=2, attempt=None), Incarnation(attempt=3, counted=True)):
        assert Incarnation.decode(one.encode()) == one


def test_starts_in_a_pod_are_counted(tmp_path: Path) -> None:
    env = {"ACCEL_POD_UID": "a", "ACCEL_STARTS": str(tmp_path / "starts")}
    for start in range(3):
        found = count_start(incarnation_from_env(env, ALONE), env)
        assert (found.pod, found.starts, found.attempt) == ("a", start, start)
    with open(env["ACCEL_STARTS"], "a") as file:
        file.write("17")  # all that a full disk took of a line
    assert [count_start(incarnation_from_env(env, ALONE), env).starts for _ in range(2)] == [3, 4]
    inside = {**env, "ACCEL_LAUNCH_ID": "x"}  # started by a rank
    assert count_start(incarnation_from_env(inside, ALONE), inside).attempt == 0
    unwritable = {**env, "ACCEL_STARTS": str(tmp_path / "no" / "such")}
    assert count_start(incarnation_from_env(unwritable, ALONE), unwritable).starts == 0


@pytest.mark.parametrize(
    ("env", "attempt"),
    [({}, 4), ({"ACCEL_ATTEMPT": "2"}, 2), ({"ACCEL_POD_FAILURES": "1"}, 1), ({"ACCEL_POD_FAILURES": ""}, None)],
)
def test_the_attempt_that_is_known(env: dict[str, str], attempt: int | None) -> None:
    assert incarnation_from_env(env, Topology(node_rank=0, nodes=1, master="a", attempt=4)).attempt == attempt


def test_an_attempt_that_is_no_number() -> None:
    with pytest.raises(LaunchConfigError, match="ACCEL_POD_FAILURES must be a whole number, not 'x'"):
        incarnation_from_env({"ACCEL_POD_FAILURES": "x"}, ALONE)


def test_the_attempt_of_a_gang_is_the_highest_of_its_nodes() -> None:
    """A pod that was evicted counts from 0 again."""
    assert latest_attempt([Incarnation(attempt=0), Incarnation(attempt=2), Incarnation(attempt=None)]) == 2
    assert latest_attempt([Incarnation(attempt=None)]) is None


def test_an_unknown_attempt_is_left_out() -> None:
    failure = Failure(rank=1, node=0, host="h", attempt=None, exit_code=3, how="exited with code 3", message="")
    assert failure.headline() == "accel launch: rank 1 on node 0 (h) failed first: exited with code 3"
