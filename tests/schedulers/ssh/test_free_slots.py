"""Which hosts get which jobs."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers.hosts.facts import Devices, Facts, Gpus, Queue
from schedulers.hosts.host_list import Host
from schedulers.hosts.jobs.placement import Capacity, choose, host_capacity, queue_settings

GPUS = Devices(kind="cuda", ids=("GPU-a", "GPU-b", "MIG/c", "GPU-d"), cpus=16)
CPUS = Devices(kind="cpu", ids=("cpu",), cpus=4)


def facts(devices: Devices, *held: str, waiting: int = 0) -> Facts:
    return Facts(
        name="h", machine="m", user="me", home="/home/me", python="3.12.0", executable="/usr/bin/python3", packages={},
        disk="/", disk_free=1, disk_writable=True, shm_free=1, processes=-1, files=-1, gpus=Gpus(count=0, how=""),
        addresses=(), time=0.0, devices=devices, queue=Queue(held=held, waiting=waiting),
    )  # fmt: skip


def job(**given: Any) -> dict[str, Any]:
    return {"gpus": 0, "cpus": None, "procs_per_node": None, "cpu_only": False, "concurrency": None, **given}


@pytest.mark.parametrize(
    ("size", "of", "expected"),
    [
        (job(), facts(CPUS), (4, 0)),
        (job(), facts(CPUS, "cpu-0", "cpu-3", "place-0"), (4, 2)),
        (job(), facts(CPUS, "cpu-0", waiting=3), (4, 7)),
        (job(procs_per_node=2), facts(CPUS, "cpu-0"), (2, 1)),
        (job(procs_per_node=9), facts(CPUS), (1, 0)),
        (job(cpus=3), facts(CPUS, "cpu-1", "cpu-2"), (1, 1)),
        (job(concurrency=5), facts(CPUS, "place-4", "cpu-0"), (5, 1)),
        (job(gpus=1), facts(GPUS, "gpu-GPU-a", "gpu-MIG_c"), (4, 2)),
        (job(gpus=3), facts(GPUS, "gpu-GPU-a"), (1, 0)),
        (job(gpus=1, concurrency=2), facts(GPUS, "place-0"), (2, 1)),
        (job(), facts(GPUS, "gpu-GPU-b"), (1, 1)),
        (job(cpu_only=True), facts(GPUS), (16, 0)),
    ],
)
def test_the_room_that_a_host_has(size: dict[str, Any], of: Facts, expected: tuple[int, int]) -> None:
    found = host_capacity(size, Host(name="h"), of)
    assert isinstance(found, Capacity)
    assert (found.capacity, found.ahead) == expected


@pytest.mark.parametrize(
    ("size", "of", "said"),
    [
        (job(cpus=5), facts(CPUS), "h: has 4 processors, not the 5 requested; request fewer, or leave it out"),
        (job(gpus=1), facts(CPUS), "h: has 0 GPUs, not the 1 requested; request fewer, or leave it out"),
        (job(gpus=5), facts(GPUS), "h: has 4 GPUs, not the 5 requested; request fewer, or leave it out"),
    ],
)
def test_what_a_host_cannot_have_room_for(size: dict[str, Any], of: Facts, said: str) -> None:
    assert host_capacity(size, Host(name="h"), of) == said


def test_slots_of_a_hostfile_are_the_processes_that_are_counted() -> None:
    assert queue_settings(job(), Host(name="h", slots=3), facts(CPUS))["procs_per_node"] == 3
    assert queue_settings(job(procs_per_node=1), Host(name="h", slots=3), facts(CPUS))["procs_per_node"] == 1
    assert queue_settings(job(), Host(name="h"), facts(GPUS))["devices"]["ids"] == GPUS.ids


def placed(rooms: list[tuple[int, int]], jobs: int, nodes: int = 1, spares: int = 0) -> list[str]:
    """`rooms` as (capacity, ahead); the hosts of each job by their letters, `+` and the spares."""
    names = "abcdefgh"
    made = [Capacity(host=Host(name=names[n]), capacity=room[0], ahead=room[1]) for n, room in enumerate(rooms)]
    found = choose(made, jobs, nodes, spares)
    return ["".join(h.name for h in members) + "+" + "".join(h.name for h in others) for members, others in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rooms": [(1, 0)] * 3, "jobs": 5}, "a+ b+ c+ a+ b+"),
        ({"rooms": [(2, 0)] * 2, "jobs": 6}, "a+ b+ a+ b+ a+ b+"),
        ({"rooms": [(1, 1), (1, 0)], "jobs": 3}, "b+ a+ b+"),
        ({"rooms": [(8, 0), (1, 0)], "jobs": 10}, "a+ a+ a+ a+ a+ a+ a+ a+ b+ a+"),
        ({"rooms": [(1, 3), (1, 0)], "jobs": 4}, "b+ b+ b+ a+"),
        ({"rooms": [(1, 0)] * 4, "jobs": 3, "nodes": 2}, "ab+ cd+ ab+"),
        ({"rooms": [(1, 1), (1, 0), (1, 0)], "jobs": 2, "nodes": 2}, "bc+ ab+"),
        ({"rooms": [(1, 0)] * 4, "jobs": 1, "nodes": 2, "spares": 1}, "ab+c"),
        ({"rooms": [(1, 0)] * 2, "jobs": 1, "nodes": 2, "spares": 1}, "ab+"),
    ],
)
def test_jobs_go_where_the_least_is_ahead_of_them(given: dict[str, Any], expected: str) -> None:
    assert " ".join(placed(**given)) == expected
