"""The report of a failure: what a rank said and did, who was first, why, and what can be done. The pure part."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.launch.console import event_writer
from accel.launch.failure import Exit, Failure, diagnose, error_in_log, first_failure, oom_kill_count


def exited(rank: int, code: int, at: float, said: str | None = None, raised_at: float | None = None) -> Exit:
    error: dict[str, Any] | None = None
    if said is not None:
        kind, _, message = said.partition(": ")
        error = {"type": kind, "message": message, "traceback": f"Traceback\n{said}\n"}
        if raised_at is not None:
            error["time"] = raised_at
    return Exit(rank=rank, local_rank=rank, pid=1, code=code, time=at, error=error)


CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:8011"
RESET = "DistBackendError: NCCL error: remote process exited or there was a network error"
FOREVER = float("inf")


@pytest.mark.parametrize(
    ("exits", "ended_at", "rank"),
    [
        ([exited(0, 0, 1), exited(1, 3, 2)], FOREVER, 1),
        ([exited(0, 1, 2), exited(1, 1, 1)], FOREVER, 1),
        ([exited(0, 1, 3, "ValueError: x", 1.0), exited(1, 1, 2, "ValueError: y", 2.0)], FOREVER, 0),
        ([exited(0, 1, 1, CLOSED, 1.0), exited(1, -9, 2)], FOREVER, 1),
        ([exited(0, 1, 1, RESET, 1.0), exited(1, -11, 2)], FOREVER, 1),
        ([exited(0, 1, 1, CLOSED, 1.0), exited(1, 1, 2, CLOSED, 2.0)], FOREVER, 0),
        ([exited(0, 1, 1, CLOSED, 1.0), exited(1, -15, 9)], 5.0, 0),
        ([exited(0, -15, 6), exited(1, 3, 4)], 5.0, 1),
        ([exited(0, -15, 6), exited(1, -15, 7)], 5.0, 0),
    ],
)
def test_first(exits: list[Exit], ended_at: float, rank: int) -> None:
    assert first_failure(exits, ended_at).rank == rank


@given(st.lists(st.tuples(st.integers(-64, 255), st.floats(0, 10), st.booleans()), min_size=1), st.floats(0, 10))
def test_the_first_is_one_that_failed(ends: list[tuple[int, float, bool]], ended_at: float) -> None:
    exits = [exited(rank, code, at, CLOSED if echo else None) for rank, (code, at, echo) in enumerate(ends)]
    if any(one.code for one in exits):
        assert first_failure(exits, ended_at).code != 0


@pytest.mark.parametrize(
    ("code", "said", "reason", "words"),
    [
        (1, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory", ["GPU", "smaller batch"]),
        (
            1,
            "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
            "out_of_memory",
            ["--memory"],
        ),
        (1, "MemoryError: ", "out_of_memory", ["memory is full"]),
        (1, "OSError: [Errno 98] Address already in use", "rendezvous", ["port", "--main_process_port"]),
        (1, "DistNetworkError: EADDRINUSE, port: 29500", "rendezvous", ["port"]),
        (
            1,
            "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(...)",
            "exit_code",
            ["collective"],
        ),
        (
            1,
            "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            "rendezvous",
            ["other ranks"],
        ),
        (1, "ModuleNotFoundError: No module named 'pandas'", "setup", ["package is missing", "python"]),
        (1, "ImportError: cannot import name 'x' from 'y'", "setup", ["version"]),
        (1, "OSError: [Errno 28] No space left on device", "exit_code", ["disk is full"]),
        (1, "OSError: [Errno 24] Too many open files", "exit_code", ["ulimit -n"]),
        (1, "RuntimeError: CUDA error: no kernel image is available", "setup", ["driver"]),
        (1, "AcceleratorError: CUDA error: device-side assert triggered", "exit_code", ["CUDA_LAUNCH_BLOCKING=1"]),
        (1, "AcceleratorError: CUDA error: invalid device ordinal", "setup", ["does not see", "device_count()"]),
        (
            1,
            "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
            "exit_code",
            ["different devices", "accelerator.device"],
        ),
        (
            1,
            "DistBackendError: NCCL error: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60",
            "setup",
            ["same GPU", "one rank"],
        ),
        (1, "ValueError: x", "exit_code", []),
        (-9, None, "exit_code", ["SIGKILL", "dmesg"]),
        (137, None, "exit_code", ["SIGKILL", "--memory"]),
        (127, None, "setup", ["not found", "PATH"]),
        (126, None, "setup", ["chmod +x"]),
        (-6, None, "exit_code", ["gloo", "ACCELERATE_DEBUG_MODE=1"]),
        (-11, None, "exit_code", ["native code crashed", "log"]),
        (5, None, "exit_code", []),
    ],
)
def test_diagnose(code: int, said: str | None, reason: str, words: list[str]) -> None:
    failure = diagnose(
        exited(3, code, 1.0, said), node=1, host="h", attempt=2, oom_kills=0, others="rank 0 had finished"
    )
    assert failure.reason == reason
    assert failure.exit_code == (code if code > 0 else 128 - code)
    assert bool(failure.cause) == bool(failure.remedy) == bool(words)
    assert all(word in failure.cause + failure.remedy for word in words), failure
    assert Failure.from_json(failure.to_json()) == failure
    text = failure.text()
    assert text.splitlines()[0].startswith("accel launch: rank 3 on node 1 (h) failed first, in attempt 2: ")
    assert "others: rank 0 had finished" in text
    assert said is None or said.strip(": ") in text


def test_a_report_is_whole_where_it_happened_and_on_node_0() -> None:
    failure = diagnose(exited(3, 7, 1.0, "ValueError: x"), node=2, host="h", attempt=0, oom_kills=0, others="")
    assert failure.text_for(0) == failure.text_for(2) == failure.text()
    assert failure.text_for(1) == failure.text().splitlines()[0]
    # Where the nodes' outputs are merged, the traceback is there once.
    merged = [failure.text_for(node, merged=True) for node in range(3)]
    assert merged.index(failure.text()) == failure.node
    assert sum("  | " in text for text in merged) == 1
    assert f"  error:  {failure.message}" in merged[0].splitlines()
    assert "  | " not in failure.text_for(failure.node, merged=True, printed=True)
    here = dataclasses.replace(failure, host=socket.gethostname())
    assert [each.text_for(None, merged=True) for each in (failure, here)] == [merged[0], here.text()]
    preempted = dataclasses.replace(failure, reason="preempted", cause="SIGUSR1")
    assert {preempted.text_for(node) for node in range(3)} == {preempted.text()}


def test_the_kernels_killing_for_memory() -> None:
    failure = diagnose(exited(0, -9, 1.0), node=0, host="h", attempt=0, oom_kills=1, others="")
    assert (failure.reason, failure.exit_code) == ("out_of_memory", 137)
    assert diagnose(exited(0, -11, 1.0), node=0, host="h", attempt=0, oom_kills=1, others="").reason == "exit_code"


def test_a_report_of_another_version_is_read() -> None:
    data = diagnose(exited(0, 1, 1.0), node=0, host="h", attempt=0, oom_kills=0, others="").to_json()
    assert Failure.from_json({**data, "schema": 9, "something": "new"}).exit_code == 1


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        (
            'x\nTraceback (most recent call last):\n  File "a", line 1\n    f()\nValueError: no\nmore\n',
            "ValueError",
            "no",
        ),
        ('Traceback (most recent call last):\n  File "a", line 1\nKeyboardInterrupt\n', "KeyboardInterrupt", ""),
        (
            "Traceback (most recent call last):\n  x\nA: 1\nTraceback (most recent call last):\n  y\npkg.mod.Bad: 2\n",
            "Bad",
            "2",
        ),
        ('Traceback (most recent call last):\n  File "a", line 1\nStopIteration\n', "StopIteration", ""),
        ('Traceback (most recent call last):\n  File "a", line 1\nAssertionError\n', "AssertionError", ""),
    ],
)
def test_the_error_in_a_log(tmp_path: Path, log: str, kind: str, message: str) -> None:
    path = tmp_path / "log"
    path.write_text("padding\n" * 5000 + log)
    found = error_in_log(str(path), 1)
    assert found is not None
    assert (found["type"], found["message"]) == (kind, message)


@pytest.mark.parametrize("log", ["", "fine\n", "Traceback (most recent call last):\n  File", "\0\xff" * 99])
def test_no_error_in_a_log(tmp_path: Path, log: str) -> None:
    (tmp_path / "log").write_text(log)
    for code in (1, -signal.SIGABRT):
        assert error_in_log(str(tmp_path / "log"), code) is None
        assert error_in_log(str(tmp_path / "none"), code) is None
        assert error_in_log(None, code) is None


_WATCHDOG = (
    "[rank0]:[E1129] Process group watchdog thread terminated with exception: …\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: "
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=10000) "
    "ran for 10013 milliseconds before timing out.\n"
    "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):\n"
)
_GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. "
    "20 vs 16\n"
)


@pytest.mark.parametrize(
    ("log", "kind", "words"), [(_WATCHDOG, "DistBackendError", "in time"), (_GLOO, "EnforceNotMet", "gloo")]
)
def test_a_rank_that_native_code_has_ended(tmp_path: Path, log: str, kind: str, words: str) -> None:
    path = tmp_path / "log"
    path.write_text("Traceback (most recent call last):\n  x\nValueError: handled\n" + log)
    end = dataclasses.replace(exited(0, -signal.SIGABRT, 1.0), error=error_in_log(str(path), -signal.SIGABRT))
    failure = diagnose(end, node=0, host="h", attempt=0, oom_kills=0, others="")
    assert failure.message.startswith(f"{kind}: ")
    assert words in failure.cause
    assert error_in_log(str(path), -signal.SIGSEGV) is None

    assert oom_kill_count() >= 0


def test_a_line_that_was_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    record = event_writer(str(tmp_path))
    record("attempt", attempt=0)
    path = tmp_path / "launch.jsonl"
    path.write_bytes(path.read_bytes() + b'{"schema": 1, "event": "fail')
    record("attempt", attempt=1)
    lines = path.read_text().splitlines()
    assert [json.loads(lines[number])["attempt"] for number in (0, 2)] == [0, 1]
