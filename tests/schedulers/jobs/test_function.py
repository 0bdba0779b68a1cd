"""Jobs of functions: what is sent, what comes back, and what is refused before a job is recorded."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from accel.launch import run_function
from schedulers import Job, JobFailed, Reason, SpecError, State
from schedulers.errors import ConfigError, NotReady, SchedulerError
from schedulers.jobs.function import pack

Submit = Callable[..., Job]


@pytest.fixture
def submit(home: Path, project: Path) -> Submit:
    return functools.partial(schedulers.submit, cwd=project)


# A new user's script: function, class and constant are in `__main__`.
SCRIPT = """
import os
import accel

OFFSET = 40

class Point:
    def __init__(self, x, rank): self.x, self.rank = x, rank

def place(a, *, b):
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], a, b)
    return Point(a + b + OFFSET, os.environ["RANK"])

if __name__ == "__main__":
    job = accel.submit(place, args=(1,), kwargs={"b": 2}, procs_per_node=2)
    point = job.result(120)
    print(isinstance(point, Point), point.x, point.rank)
    print(*sorted(line.text for line in job.logs() if line.rank is not None), sep="", end="")
"""


def test_each_rank_calls_the_function_and_the_first_one_s_value_comes_back(home: Path, project: Path) -> None:
    (project / "try.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}
    done = subprocess.run([sys.executable, "try.py"], cwd=project, env=env, capture_output=True, text=True)
    assert done.stdout == "True 43 0\nrank 0 of 2 1 2\nrank 1 of 2 1 2\n", done.stderr


def test_functions_may_be_sent_and_returned(submit: Submit) -> None:
    factor = 3
    job = submit(lambda n: lambda x: n * x * factor, args=[2])
    assert job.result(120)(7) == 42
    assert (job.name, job.spec.argv[1]) == ("lambda", "lambda")
    (job.record.directory / "result.pkl").write_bytes(b"cnowhere\nnothing\n.")
    with pytest.raises(SchedulerError, match=f"the value of job {job.id} cannot be loaded here: ModuleNotFoundError"):
        job.result()


def test_the_plan_has_the_file_s_size_and_digest(submit: Submit) -> None:
    job = submit(print, args=("out",))
    content = (job.record.directory / "function.pkl").read_bytes()
    argv = ("accel.launch.run_function", "print", f"bytes={len(content)}",
            f"sha256={hashlib.sha256(content).hexdigest()}")  # fmt: skip
    plan = job.record.plan()
    assert plan.actions[1][-4:] == argv
    assert " ".join(argv) in str(plan)
    assert str(plan) == str(schedulers.dry_run(job.spec, "local", job.id))
    header = json.loads(content.partition(b"\n")[0])
    assert header["python"] == platform.python_version()
    assert header["cloudpickle"][0].isdigit()
    assert job.result(120) is None


def raises_on_rank_1() -> Callable[[], None]:
    def check() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("no data")

    return check


def returns_a_generator() -> Callable[[], object]:
    return lambda: (number for number in range(3))


def test_a_failed_job_raises_its_status_s_message(submit: Submit) -> None:
    job = submit(raises_on_rank_1(), procs_per_node=2)
    with pytest.raises(JobFailed, match=rf"job {job.id} failed \(exit_code\): rank 1: ValueError: no data"):
        job.result(120)


def test_a_value_that_cannot_be_pickled_fails_the_job(submit: Submit) -> None:
    job = submit(returns_a_generator())
    with pytest.raises(JobFailed, match="the value that lambda returned cannot be pickled: cannot pickle 'generator'"):
        job.result(120)
    assert list(job.record.directory.glob("result*")) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_value_is_written_whole_or_not_at_all(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        run_function.write(str(tmp_path / "result.pkl"), b"value")
    assert not (tmp_path / "result.pkl").exists()


def test_a_function_that_ends_the_process_leaves_no_value(submit: Submit) -> None:
    job = submit(sys.exit)
    with pytest.raises(NotReady, match=f"job {job.id} left no value"):
        job.result(120)


def test_a_result_that_takes_too_long(submit: Submit, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = submit(gate.read_text)
    with pytest.raises(TimeoutError, match=f"job {job.id} is not over"):
        job.result(0)
    job.cancel()
    with pytest.raises(JobFailed, match=f"job {job.id} cancelled"):
        job.result()


def test_a_job_without_cloudpickle_is_a_setup_failure(submit: Submit, project: Path) -> None:
    (project / "cloudpickle.py").write_text("raise ImportError('broken')")
    job = submit(print)
    status = job.wait(120)
    python = platform.python_version()
    assert (status.state, status.reason) == (State.FAILED, Reason.SETUP)
    assert f"pickled by Python {python} with cloudpickle " in status.message
    assert f", and this is Python {python} with no cloudpickle" in status.message


def test_another_minor_version_of_python_is_a_setup_failure(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(platform, "python_version", lambda: "3.9.18")
        job = submit(print)
    status = job.wait(120)
    assert (status.state, status.reason) == (State.FAILED, Reason.SETUP)
    assert "pickled by Python 3.9.18 with cloudpickle" in status.message
    assert f"this is Python {platform.python_version()} with cloudpickle" in status.message


def test_another_patch_version_loads_and_another_file_does_not(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(platform, "python_version", lambda: "{}.{}.99".format(*sys.version_info))
        argv, content = pack(divmod, (7, 2), {})
    path = tmp_path / "function.pkl"
    path.write_bytes(content)
    function, args, kwargs = run_function.load(str(path), argv[-1])
    assert function(*args, **kwargs) == (3, 1)
    path.write_bytes(content + b"\0")
    with pytest.raises(run_function.SetupError, match="is not what was submitted"):
        run_function.load(str(path), argv[-1])


async def coroutine() -> None:
    """Runs nothing when it is called."""


def generator() -> Iterator[int]:
    yield 1


class CallableGenerator:
    def __call__(self) -> Iterator[int]:
        yield 1


def uses_a_lock() -> Callable[[], object]:
    lock = threading.Lock()
    return lambda: lock


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (uses_a_lock(), {}, "lock, which lambda uses, cannot be pickled: cannot pickle '_thread.lock'"),
        (print, {"args": (1, LOCK)}, "argument 2 of print cannot be pickled: cannot pickle '_thread.lock'"),
        (print, {"kwargs": {"file": LOCK}}, "argument file of print cannot be pickled"),
        (LOCK.acquire, {}, "acquire cannot be pickled"),
        (coroutine, {}, "coroutine is a generator or coroutine function, whose call runs nothing"),
        (functools.partial(generator), {}, "generator is a generator or coroutine function"),
        (CallableGenerator(), {}, "CallableGenerator is a generator or coroutine function"),
        (print, {"args": "abc"}, "args must be a tuple or a list, not str"),
        (print, {"args": (bytes(64_000_001),)}, "64 MB when pickled, and 64 MB is the limit"),
        ("train.py", {"kwargs": {"a": 1}}, "kwargs are for functions"),
        ("accel.launch.run_function", {"entry": "module"}, "runs in jobs that accel.submit(FUNCTION) makes"),
        (print, {"target": "ssh", "options": {"hosts": ["a"]}}, "target ssh: functions run on local targets, slurm"),
        (print, {"target": "kubernetes"}, "target kubernetes: functions run on local targets"),
        (print, {"target": "slurm", "options": {"login": "a"}}, "target slurm: functions run on local targets"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_before_a_record(
    submit: Submit, function: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as error:
        submit(function, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert schedulers.list_jobs() == []


def test_cloudpickle_is_missing_here(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"pip install 'accel-launch\[functions\]'"):
        submit(print)


def test_a_job_of_a_script_has_no_result(submit: Submit) -> None:
    with pytest.raises(SpecError, match="runs a program, not a function"):
        submit("true", entry="command").result()
