"""A machine's queue for those that cannot wait: looks that never block, and what the examination of a host sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedulers.hosts.remote_files import host_programs, program_loader
from schedulers.hosts.supervisor.slots import NotEnoughSlots, SlotRequest, Slots, visible
from schedulers.node import probe

TWO = [SlotRequest(what="processors", count=2, slots=["cpu-0", "cpu-1", "cpu-2"])]


def test_a_look_takes_all_slots_or_none_and_says_why(tmp_path: Path) -> None:
    first, second = Slots(tmp_path, "a"), Slots(tmp_path, "b", "gpu01")
    assert first.try_acquire(TWO) == (["cpu-0", "cpu-1"], "")
    assert second.try_acquire(TWO) == ([], "waits for 2 of gpu01's 3 processors")
    one = [SlotRequest(what="processors", count=1, slots=TWO[0].slots)]
    third = Slots(tmp_path, "c", "gpu01")
    assert third.try_acquire(one) == ([], "waits for its turn on gpu01 behind job b")
    assert third.ahead == 1
    first.release()
    assert second.try_acquire(TWO) == (["cpu-0", "cpu-1"], "")
    assert third.try_acquire(one) == (["cpu-2"], "")
    assert third.ahead == 0


def test_who_steps_out_lets_the_next_go_on(tmp_path: Path) -> None:
    slots = [Slots(tmp_path, name) for name in "abc"]
    assert slots[0].try_acquire(TWO)[0]
    assert slots[1].try_acquire(TWO)[1] == "waits for 2 of this machine's 3 processors"
    assert slots[2].try_acquire(TWO)[1] == "waits for its turn behind job b"
    slots[1].dequeue()
    slots[1].dequeue()
    assert slots[2].try_acquire(TWO)[1] == "waits for 2 of this machine's 3 processors"
    slots[0].release()
    assert slots[2].try_acquire(TWO) == (["cpu-0", "cpu-1"], "")


def test_an_earlier_job_that_comes_later_is_first(tmp_path: Path) -> None:
    holder, late, early = (Slots(tmp_path, name) for name in ("a", "c", "b"))
    holder.try_acquire(TWO)
    late.try_acquire(TWO)
    early.try_acquire(TWO)
    holder.release()
    assert late.try_acquire(TWO) == ([], "waits for its turn behind job b")
    assert early.try_acquire(TWO) == (["cpu-0", "cpu-1"], "")


def test_a_dead_job_s_ticket_and_slots_are_nobody_s(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from supervisor.slots import Slots, SlotRequest\n"
    code += "w = [SlotRequest(what='p', count=1, slots=['cpu-0'])]\n"
    code += "a, b = Slots(sys.argv[2], 'a'), Slots(sys.argv[2], 'b')\n"
    code += "assert a.try_acquire(w)[0] and not b.try_acquire(w)[0]"
    hostside = Path(__file__).parents[3] / "schedulers/hosts"
    subprocess.run([sys.executable, "-c", code, str(hostside), str(tmp_path)], check=True)
    assert len(list(tmp_path.rglob("queue/*"))) == 1
    assert Slots(tmp_path, "c").try_acquire(TWO) == (["cpu-0", "cpu-1"], "")
    assert not list(tmp_path.rglob("queue/*"))


def test_more_than_there_are_is_refused_at_once(tmp_path: Path) -> None:
    slots = Slots(tmp_path, "a")
    with pytest.raises(NotEnoughSlots, match="4 processors requested, but this machine has 3"):
        slots.try_acquire([SlotRequest(what="processors", count=4, slots=TWO[0].slots)])
    assert not list(tmp_path.rglob("queue/*"))


def test_a_queue_has_one_id_for_all_who_use_it(tmp_path: Path) -> None:
    assert len({Slots(tmp_path, name).id for name in "abc"}) == 1
    assert Slots(tmp_path / "other", "a").id != Slots(tmp_path, "a").id
    (there,) = (tmp_path / "local").iterdir()
    (tmp_path / "alias").symlink_to(tmp_path)
    assert Slots(tmp_path / "alias", "a").id == Slots(tmp_path, "a").id
    assert sorted(path.name for path in there.iterdir()) == ["queue", "slots"]


def test_jobs_see_the_gpus_among_their_slots() -> None:
    assert visible(["gpu-GPU-a", "gpu-1", "cpu-0"], {"kind": "cuda"}) == {"CUDA_VISIBLE_DEVICES": "GPU-a,1"}
    assert visible(["gpu-0"], {"kind": "xpu"}) == {"ZE_AFFINITY_MASK": "0"}
    assert visible(["cpu-0", "place-1"], {"kind": "cuda"}) == {}


def test_the_examination_of_a_host_sees_its_queue(tmp_path: Path) -> None:
    def seen() -> dict[str, Any]:
        program = host_programs("listen", "program", "probe")
        request = json.dumps({"do": "facts", "root": str(tmp_path), "packages": {}}).encode() + b"\n"
        argv = [sys.executable, "-c", program_loader(program)]
        done = subprocess.run(argv, input=program + request, stdout=subprocess.PIPE, check=True)
        return dict(json.loads(done.stdout))

    assert seen()["queue"] == {"held": [], "waiting": 0}
    holder, waiter = Slots(tmp_path, "a"), Slots(tmp_path, "b")
    holder.try_acquire(TWO)
    waiter.try_acquire(TWO)
    facts = seen()
    assert (sorted(facts["queue"]["held"]), facts["queue"]["waiting"]) == (["cpu-0", "cpu-1"], 1)
    assert facts["devices"]["cpus"] == len(os.sched_getaffinity(0))
    holder.release()
    waiter.dequeue()
    assert seen()["queue"] == {"held": [], "waiting": 0}


@pytest.mark.parametrize(
    ("counted", "kind", "ids"),
    [
        ({"count": 2, "how": "kfd"}, "cuda", ["0", "1"]),  # AMD's, which accel does not name
        ({"count": 2, "how": "nvml"}, "cpu", ["cpu"]),  # hidden by CUDA_VISIBLE_DEVICES
        ({"count": 0, "how": ""}, "cpu", ["cpu"]),
    ],
)
def test_gpus_without_a_name_are_numbered(
    monkeypatch: pytest.MonkeyPatch, counted: dict[str, Any], kind: str, ids: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = probe.devices(counted)
    assert (found["kind"], found["ids"]) == (kind, ids)


def python_that_runs(tmp_path: Path, script: str) -> str:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f'exec {sys.executable} -I -S "$@"', ""),  # accel is missing
        ("echo a; echo trace >&2; echo 'libcuda: no' >&2; exit 3", "failed (exit code 3): libcuda: no"),
        ("kill -SEGV $$", "failed (signal 11): it printed nothing"),
    ],
)
def test_gpus_are_numbered_where_accel_finds_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    monkeypatch.setattr(sys, "executable", python_that_runs(tmp_path, script))
    found = probe.devices({"count": 2, "how": "nvml"})
    cpus = len(os.sched_getaffinity(0))
    assert found == {"kind": "cuda", "ids": ["0", "1"], "cpus": cpus, "problem": problem}
