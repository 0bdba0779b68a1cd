"""The queue for this machine: first come, first served, and slots that come free however their holder ends."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from schedulers import Job, Reason, State
from schedulers.errors import SpecError, SubmitError
from schedulers.hosts.supervisor.slots import SlotRequest, Slots, required_slots
from schedulers.local.job_files import JobFiles
from schedulers.processes import boot_id
from tests.nvml import fake_gpus
from tests.waiting import until

from .conftest import Submit, printed, supervisor_of, until_printed

HOLD = """
import os, time
print("has", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"""


def devices(kind: str = "cpu", ids: int = 1, cpus: int = 4) -> dict[str, object]:
    return {"kind": kind, "ids": [f"GPU-{n}" for n in range(ids)], "cpus": cpus}


def settings(**changed: object) -> dict[str, object]:
    return {"gpus": 0, "cpus": None, "procs_per_node": None, "concurrency": None, "cpu_only": False} | changed


@pytest.mark.parametrize(
    ("job", "machine", "expected"),
    [
        (settings(), devices(), [("processors", 1)]),
        (settings(procs_per_node=3), devices(), [("processors", 3)]),
        (settings(procs_per_node=9), devices(), [("processors", 4)]),
        (settings(cpus=2), devices(), [("processors", 2)]),
        (settings(concurrency=2), devices(), [("places", 1)]),
        (settings(), devices("cuda", 8), [("GPUs", 8)]),
        (settings(procs_per_node=2), devices("cuda", 8), [("GPUs", 2)]),
        (settings(gpus=3), devices("cuda", 8), [("GPUs", 3)]),
        (settings(gpus=3, cpus=2), devices("cuda", 8), [("GPUs", 3), ("processors", 2)]),
        (settings(cpu_only=True), devices("cuda", 8), [("processors", 1)]),
        (settings(gpus=1), devices(), [("GPUs", 1)]),
        (settings(), devices("mps"), [("processors", 1)]),
    ],
)
def test_what_a_job_takes(job: dict[str, object], machine: dict[str, object], expected: list[tuple[str, int]]) -> None:
    assert [(want.what, want.count) for want in required_slots(job, machine)] == expected


def test_what_is_written_while_the_status_is_read_is_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(1000.0)
    monkeypatch.setattr("time.time", lambda: next(times))
    monkeypatch.setattr(JobFiles, "read", lambda *_: time.time() and None)
    assert JobFiles(tmp_path).progress().observed_at == 1000.0


def test_who_came_first_is_first_however_late_it_looks(tmp_path: Path) -> None:
    want = [SlotRequest(what="places", count=1, slots=["place-0"])]
    first, second = Slots(tmp_path, "a"), Slots(tmp_path, "b")
    first.enqueue()
    assert second.try_acquire(want) == ([], "waits for its turn behind job a")
    assert first.try_acquire(want) == (["place-0"], "")


def test_those_at_the_end_of_a_long_line_look_rarely(tmp_path: Path) -> None:
    want = [SlotRequest(what="places", count=1, slots=["place-0"])]
    jobs = [Slots(tmp_path, f"{number:03}") for number in range(200)]
    for job in jobs:
        job.try_acquire(want)
    assert [job.pause_s < 0.3 for job in jobs[1:3]] == [True, True]  # the next two: the first of all has its slots
    assert {job.pause_s for job in jobs[20:]} == {1.0}


def test_a_ticket_that_was_taken_for_a_dead_job_s_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next in line looks between its being made and its being locked."""
    slots = Slots(tmp_path, "a")
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.undo()
        (ticket,) = tmp_path.rglob("queue/a")
        ticket.unlink()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    slots.enqueue()
    (ticket,) = tmp_path.rglob("queue/a")
    with ticket.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    slots.dequeue()
    assert not list(tmp_path.rglob("queue/a"))


def test_one_at_a_time_in_the_order_of_submission(submit: Submit, project: Path) -> None:
    one = {"concurrency": 1}
    first = submit(HOLD, name="first.py", options=one)
    until_printed(first, "has")
    text = "import os, sys; open('order', 'a').write(os.environ['ACCEL_JOB_ID'] + '\\n')"
    rest = [submit(text, options=one) for _ in range(5)]
    assert {job.status().state for job in rest} == {State.QUEUED}
    until(lambda: "waits for 1 of this machine's 1 places" in rest[0].status().message, "the reason of the first")
    until(lambda: f"behind job {rest[0].id}" in rest[1].status().message, "the reason of the second")
    (project / "go").touch()
    for job in rest:
        assert job.wait().state is State.SUCCEEDED
    assert (project / "order").read_text().split() == [job.id for job in rest]


def test_a_killed_job_s_place_and_ticket_come_free(submit: Submit, project: Path) -> None:
    one = {"concurrency": 1}
    holder = submit(HOLD, name="holder.py", options=one)
    until_printed(holder, "has")
    waiting = submit("print('never')", name="waiting.py", options=one)
    last = submit("print('ran')", name="last.py", options=one)
    until(lambda: f"behind job {waiting.id}" in last.status().message, "the last in line")
    for job in (waiting, holder):
        supervisor = supervisor_of(job)
        assert supervisor is not None
        supervisor.send(signal.SIGKILL)
    assert last.wait(60).state is State.SUCCEEDED
    assert printed(last) == "ran\n"
    assert waiting.status().reason is Reason.LOST


def test_each_job_gets_gpus_of_its_own(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"])

    def holding(name: str, gpus: int) -> Job:
        # One process, whatever the number of GPUs: the program needs none, and there are none.
        return submit(HOLD, name=name, gpus=gpus, procs_per_node=1)

    two, one = holding("two.py", 2), holding("one.py", 1)
    until_printed(two, "has")
    until_printed(one, "has")
    assert printed(two) == "has GPU-aaaa,GPU-bbbb\n"
    assert printed(one) == "has GPU-cccc\n"
    third = holding("third.py", 2)
    until(lambda: "waits for 2 of this machine's 3 GPUs" in third.status().message, "a reason for waiting")
    one.cancel()
    assert third.status().state is State.QUEUED
    two.cancel()
    until_printed(third, "has")
    # The GPUs of a job that ends become free one after the other: any two of the three.
    assert re.fullmatch(r"has GPU-(aaaa,GPU-bbbb|aaaa,GPU-cccc|bbbb,GPU-cccc)\n", printed(third))
    third.cancel()


def test_the_next_in_line_waits_for_ranks_whose_supervisor_was_killed(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-aaaa"])
    linger = "import signal, os, time\nsignal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n" + HOLD
    first = submit(linger, name="first.py", gpus=1)
    until_printed(first, "has")
    second = submit("print('ran')", name="second.py", gpus=1)
    supervisor = supervisor_of(first)
    assert supervisor is not None
    supervisor.send(signal.SIGKILL)
    until_printed(first, "told")
    until(lambda: second.status().reason is Reason.NO_CAPACITY, "it waits")
    assert printed(second) == ""
    (Path(first.spec.code) / "go").touch()
    assert second.wait(60).state is State.SUCCEEDED


def test_more_processes_than_gpus_are_refused(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, ["GPU-aaaa"])
    with pytest.raises(SpecError, match=r"^--procs-per-node 2: this machine has 1 GPU \(nvidia-smi lists them\)"):
        submit("print('ran')", procs_per_node=2)
    assert submit("print('ran')", procs_per_node=1).wait(60).state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("os._exit(3)", "failed with exit code 3"),
    ],
)
def test_a_probe_that_a_driver_ends_is_one_line(
    code: str, outcome: str, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os, signal, sys\n"
        f"if 'accel.launch.devices' in str(sys.orig_argv): os.write(2, b'first\\nno driver\\n'); {code}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with pytest.raises(SubmitError) as raised:
        submit("print('ran')", gpus=1)
    assert str(raised.value).startswith(f"the probe for this machine's devices {outcome}: no driver (`python -m")


def test_the_queue_is_this_boot_s_and_follows_an_earlier_version_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [SlotRequest(what="places", count=1, slots=["place-0"])]
    monkeypatch.setattr("schedulers.hosts.supervisor.slots.boot_id", lambda: "")
    earlier = Slots(tmp_path, "a")
    assert earlier.try_acquire(want) == (["place-0"], "")
    monkeypatch.undo()
    later = Slots(tmp_path, "b")
    assert later.try_acquire(want)[0] == []
    monkeypatch.setattr("platform.node", lambda: "renamed")
    assert Slots(tmp_path, "c").try_acquire(want)[0] == []
    earlier.release()
    assert later.try_acquire(want) == (["place-0"], "")
    assert sorted(path.name for path in (tmp_path / "local").iterdir()) == sorted([boot_id(), os.uname().nodename])
